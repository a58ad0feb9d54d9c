// SPDX-License-Identifier: Apache-2.0
#include "score/spirv.hpp"

#include "score/print.hpp"
#include "score/spirv_compiler.hpp"

namespace lowbit {
namespace {

// The printed function, and one that takes out of `captured` what it wants.
std::string text_of(const ScoreFunction& function) {
  const std::string_view gradient = function.gradient ? "gradient" : "score";
  std::string text = concat("float exported(float score, ", function.gradient ? "float gradient, " : "",
                            "int b, int h, int q, int k, __global const unsigned long* captured) {\n  return ");
  if (!function.call) return concat(text, gradient, ";\n}\n");
  const int count = function.call->captured_count();
  text += concat(function.call->program().is_mask ? "mask_mod" : "score_mod", function.gradient ? "_gradient" : "",
                 "(score, ", function.gradient ? "gradient, " : "", "b, h, q, k, ");
  for (int i = 0; i < count; i++) text += concat("captured[", 1 + i, "], ");
  for (int i = 0; function.gradient && i < count; i++)
    if (function.call->program().graph.captured[i].type == 'f') text += concat("captured[", 1 + count + i, "], ");
  return concat(score_source(*function.call, SourceLanguage::opencl, function.gradient), text, "captured + ",
                1 + 2 * count, ", captured[0]);\n}\n");
}

}  // namespace

std::vector<uint32_t> score_spirv(std::span<const ScoreFunction> functions, bool sums) {
  spirv::Compiler compiler(sums);
  compiler.read(concat("#define GRADIENT __global float*\n", score_source_prelude(SourceLanguage::opencl, false)));
  for (const ScoreFunction& function : functions) {
    compiler.read(text_of(function));
    compiler.export_function("exported", function.name);
  }
  return compiler.module().words();
}

std::vector<uint64_t> score_table(const ScoreCall& call, const int32_t* fault, std::span<float* const> gradients) {
  const auto count = static_cast<std::size_t>(call.captured_count());
  std::vector<uint64_t> table(1 + 2 * count);
  table[0] = reinterpret_cast<uintptr_t>(fault);
  for (std::size_t i = 0; i < count; i++) table[1 + i] = reinterpret_cast<uintptr_t>(call.captured()[i].data);
  for (std::size_t i = 0; i < gradients.size(); i++)
    table[1 + count + i] = reinterpret_cast<uintptr_t>(gradients[i]);
  for (std::size_t i = 0; i < count; i++) {
    const TensorView& tensor = call.captured()[i];
    for (int d = 0; d < tensor.rank; d++) table.push_back(static_cast<uint64_t>(tensor.shape[d]));
    for (int d = 0; d < tensor.rank; d++) table.push_back(static_cast<uint64_t>(tensor.stride[d]));
  }
  return table;
}

}  // namespace lowbit
