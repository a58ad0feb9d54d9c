// SPDX-License-Identifier: Apache-2.0
// One backend per instruction set that was compiled; the list is csrc/cpu/CMakeLists.txt.
#include "cpu/backend.hpp"

#include <array>
#include <iterator>

namespace lowbit::cpu {

#define LOWBIT_CPU_ISA(isa)                                  \
  namespace isa {                                            \
  std::span<const Kernel<LinearArgs>> linear_rows();         \
  std::span<const Kernel<QuantizeArgs>> quantize_rows();     \
  std::span<const Kernel<OptimArgs>> optim_rows();           \
  std::span<const Kernel<ScoreProgramArgs>> score_program_rows();           \
  std::span<const Kernel<AttentionForwardArgs>> attention_forward_rows();   \
  std::span<const Kernel<AttentionBackwardArgs>> attention_backward_rows(); \
  std::span<const Kernel<DecodeArgs>> decode_rows();                        \
  std::span<const Kernel<KvQuantizeArgs>> kv_quantize_rows();               \
  std::span<const Kernel<KvDequantizeArgs>> kv_dequantize_rows();           \
  }
#include "cpu/isas.inc"
#undef LOWBIT_CPU_ISA

std::span<const Backend* const> backends() {
  static const Backend all[] = {
#define LOWBIT_CPU_ISA(isa) {#isa, Isa::isa, isa::linear_rows(), isa::quantize_rows(), isa::optim_rows(), isa::score_program_rows(), isa::attention_forward_rows(), isa::attention_backward_rows(), \
                             isa::decode_rows(), isa::kv_quantize_rows(), isa::kv_dequantize_rows()},
#include "cpu/isas.inc"
#undef LOWBIT_CPU_ISA
  };
  static const auto pointers = [] {
    std::array<const Backend*, std::size(all)> list{};
    for (std::size_t i = 0; i < list.size(); i++) list[i] = &all[i];
    return list;
  }();
  return pointers;
}

}  // namespace lowbit::cpu
