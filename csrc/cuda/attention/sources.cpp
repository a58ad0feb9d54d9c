// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/kind.hpp"
#include "cuda/attention/mods.hpp"
#include "score/program_hash.hpp"

namespace lowbit::cuda {
namespace {

std::string text_of(DType dtype) {
  return concat("lowbit::DType::", dtype == DType::boolean ? "boolean" : name_of(dtype));
}

std::string mods_text(const AttentionKind& kind, Gradient gradient) {
  const auto text_of_bool = [](bool value) { return value ? "true" : "false"; };
  return mods_text(kind.score, kind.mask, gradient,
                   concat("  static constexpr bool kFolds = ", text_of_bool(kind.folds()), ", kDropout = ",
                          text_of_bool(kind.dropout), ";\n  static constexpr auto kGathers = lowbit::cuda::Gathers{",
                          static_cast<int>(kind.gathers()), "};\n  static constexpr lowbit::DType kBias = ",
                          text_of(kind.bias), ";\n"));
}

std::string attention_kernel(std::string_view name, std::string_view body) {
  return kernel_text(name, "kAttentionThreads", "AttentionCall", body);
}
std::string wgmma_kernel(std::string_view name, std::string_view body, std::string_view call = "WgmmaAttentionCall") {
  return kernel_text(name, "kWgmmaAttentionThreads", call, body);
}

}  // namespace

AttentionKind kind_of(const AttentionForwardArgs& args) {
  return {.dtype = args.q.dtype, .e = static_cast<int>(args.q.size(3)), .ev = static_cast<int>(args.ev()),
          .score = args.score_mod, .mask = args.mask_mod, .bias = args.mask.dtype, .dropout = args.dropout_p > 0,
          .scales = !(args.scale > 0)};
}

bool gathers(const ScoreCall* mod, Stage from) {
  if (!mod) return false;
  const ScorePlan& plan = mod->program().forward;
  for (int at = plan.begin[static_cast<int>(from)]; at < plan.begin[kStages]; at++)
    if (plan.steps[at].op == number_of<lowbit::score::Gather>()) return true;
  return false;
}

Gathers AttentionKind::gathers() const {
  return cuda::gathers(score, Stage::row)  ? Gathers::by_score
         : cuda::gathers(mask, Stage::row) ? Gathers::by_mask
                                           : Gathers::none;
}

SourceKey AttentionKind::key(AttentionKernel kernel) const {
  const int64_t sizes = (static_cast<int64_t>(dtype) * 512 + e) * 512 + ev,
                flags = (static_cast<int64_t>(bias) * 2 + dropout) * 2 + scales;
  const int64_t mods = (score ? 1 : 0) + (mask ? 2 : 0);
  const bool of_mods = kernel >= AttentionKernel::forward;
  return {static_cast<int64_t>(SourceKind::attention), static_cast<int64_t>(kernel) << 32 | sizes,
          of_mods ? flags << 2 | mods : 0, of_mods ? ProgramHash(score).value() : 0,
          of_mods ? ProgramHash(mask).value() : 0};
}

Source attention_source(const AttentionKind& kind, AttentionKernel kernel) {
  const std::string sizes = concat(text_of(kind.dtype), ", ", kind.e, ", ", kind.ev),
                    what = concat(name_of(kind.dtype), ", head dims ", kind.e, " and ", kind.ev,
                                  kind.score ? ", a score_mod" : "", kind.mask ? ", a mask_mod" : "",
                                  kind.bias != DType::other ? concat(", a mask of ", name_of(kind.bias)) : "",
                                  kind.dropout ? ", dropout" : "", kind.scales ? ", any scale" : "");
  const std::string prepare = "#include \"cuda/attention/prepare.cuh\"\n";
  switch (kernel) {
    case AttentionKernel::prepare:
      return {"classes of blocks of attention", prepare + attention_kernel("prepare", "attention_prepare")};
    case AttentionKernel::sink:
      return {"gradient of a sink", prepare + attention_kernel("sink_gradient", "sink_gradient")};
    case AttentionKernel::statistics:
      return {concat("rows of the attention backward of ", name_of(kind.dtype), ", head dim ", kind.ev),
              prepare + attention_kernel("row_statistics",
                                         concat("row_statistics<", text_of(kind.dtype), ", ", kind.ev, ">"))};
    case AttentionKernel::forward:
      return {concat("attention forward of ", what),
              concat("#include \"cuda/attention/forward.cuh\"\n", mods_text(kind, Gradient::none),
                     attention_kernel("attention_forward", concat("attention_forward<", sizes, ", Mods>")))};
    case AttentionKernel::forward_wgmma:
      return {concat("attention forward by warpgroups of ", what),
              concat("#include \"cuda/attention/forward_wgmma.cuh\"\n", mods_text(kind, Gradient::none),
                     wgmma_kernel("attention_forward_wgmma", concat("attention_forward_wgmma<", sizes, ", Mods>")))};
    case AttentionKernel::prompt_wgmma:
      return {concat("attention of prompts by warpgroups of ", what),
              concat("#include \"cuda/attention/forward_wgmma.cuh\"\n", mods_text(kind, Gradient::none),
                     wgmma_kernel("attention_prompt_wgmma", concat("attention_forward_wgmma<", sizes, ", Mods>"),
                                  "WgmmaPromptCall"))};
    case AttentionKernel::backward_wgmma:
      return {concat("attention backward by warpgroups of ", what),
              concat("#include \"cuda/attention/backward_wgmma.cuh\"\n", mods_text(kind, Gradient::of_score),
                     attention_kernel("attention_units", concat("attention_units<", sizes, ", Mods>")),
                     wgmma_kernel("attention_keys_wgmma", concat("attention_backward_wgmma<", sizes, ", Mods, true>")),
                     wgmma_kernel("attention_queries_wgmma",
                                  concat("attention_backward_wgmma<", sizes, ", Mods, false>")))};
    case AttentionKernel::captured_ends:
      return {"gradients of captured tensors",
              concat("#include \"cuda/attention/captured.cuh\"\n", attention_kernel("captured_start", "captured_start"),
                     attention_kernel("captured_finish", "captured_finish"))};
    case AttentionKernel::captured:
      return {concat("gradients of captured tensors of ", what),
              concat("#include \"cuda/attention/backward.cuh\"\n#include \"cuda/attention/captured.cuh\"\n",
                     mods_text(kind, Gradient::of_captured),
                     attention_kernel("attention_captured",
                                      concat("attention_backward<", sizes, ", Mods, false, true>")))};
    default: break;
  }
  return {concat("attention backward of ", what),
          concat("#include \"cuda/attention/backward.cuh\"\n", mods_text(kind, Gradient::of_score),
                 attention_kernel("attention_keys", concat("attention_backward<", sizes, ", Mods, true>")),
                 attention_kernel("attention_queries", concat("attention_backward<", sizes, ", Mods, false>")))};
}

void add_attention_sources(std::vector<Source>& all, const std::string& architecture) {
  for (const int e : {64, 128}) {
    const AttentionKind kind{DType::bfloat16, e, e};
    for (const auto kernel : {AttentionKernel::forward, AttentionKernel::statistics, AttentionKernel::backward})
      all.push_back(attention_source(kind, kernel));
    if (architecture != kHopper) continue;
    for (const auto kernel :
         {AttentionKernel::forward_wgmma, AttentionKernel::prompt_wgmma, AttentionKernel::backward_wgmma})
      all.push_back(attention_source(kind, kernel));
  }
}

}  // namespace lowbit::cuda
