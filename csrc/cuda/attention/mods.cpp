// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/mods.hpp"

#include "score/print.hpp"

namespace lowbit::cuda {
namespace {

// Prints a function of Mods that makes the printed struct of one head, with the captured tensors from the call.
std::string making(const ScoreCall& mod, std::string_view name, std::string_view printed, Gradient of) {
  const std::string_view captured = mod.program().is_mask ? "call.mask" : "call.score";
  std::string text = concat("  template <class Call>\n  LOWBIT_INLINE static auto ", name,
                            "(const Call& call, int b, int h) {\n    ", printed, " made{");
  for (int i = 0; i < mod.captured_count(); i++)
    text += concat("lowbit::cuda::Elements{", captured, ".tensors[", i, "]}, ");
  for (int i = 0; of != Gradient::none && i < mod.captured_count(); i++)
    if (mod.program().graph.captured[i].type == 'f')
      text += of == Gradient::of_captured ? concat("lowbit::cuda::Sums{call, ", i, "}, ") : "lowbit::cuda::NoSum(), ";
  return concat(text, "reinterpret_cast<const long long*>(", captured,
                ".layout), call.fault, b, h};\n    made.of_head();\n    return made;\n  }\n");
}

}  // namespace

CapturedCall captured_of(const ScoreCall* mod) {
  CapturedCall made{};
  int64_t* layout = made.layout;
  for (int i = 0; mod && i < mod->captured_count(); i++) {
    const TensorView& tensor = mod->captured()[i];
    made.tensors[i] = tensor.data;
    for (int d = 0; d < tensor.rank; d++) *layout++ = tensor.shape[d];
    for (int d = 0; d < tensor.rank; d++) *layout++ = tensor.stride[d];
  }
  return made;
}

bool fits(const ScoreCall* mod) {
  if (!mod) return true;
  int numbers = 0;
  for (int i = 0; i < mod->captured_count(); i++) numbers += 2 * mod->captured()[i].rank;
  return mod->captured_count() <= kMaxCaptured && numbers <= kMaxLayout;
}

std::string mods_text(const ScoreCall* score, const ScoreCall* mask, Gradient gradient, std::string_view constants) {
  std::string text, functions;
  const auto add = [&](const ScoreCall& mod, std::string_view name, std::string_view printed, Gradient of) {
    functions += making(mod, name, printed, of);
    text += score_struct(mod, of != Gradient::none);
  };
  if (score || mask)
    text = concat("#define tanh_of(a) lowbit::cuda::tanh_of_score(a)\n#define note_fault(fault, ...) (*(fault) = 1)\n",
                  "#define GRADIENT lowbit::cuda::", gradient == Gradient::of_captured ? "Sums" : "NoSum", "\n",
                  score_source_prelude(SourceLanguage::cuda, false));
  if (score) add(*score, "score", "score_mod", Gradient::none);
  if (score && gradient != Gradient::none) add(*score, "gradient", "score_mod_gradient", gradient);
  if (mask) add(*mask, "mask", "mask_mod", Gradient::none);
  return concat(text, "struct Mods {\n  static constexpr bool kScore = ", score ? "true" : "false", ", kMask = ",
                mask ? "true" : "false", ";\n", constants, functions, "};\n");
}

}  // namespace lowbit::cuda
