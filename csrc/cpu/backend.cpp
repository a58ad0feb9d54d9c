// SPDX-License-Identifier: Apache-2.0
// One backend per instruction set that was compiled; the list is csrc/cpu/CMakeLists.txt.
#include "cpu/backend.hpp"

#include <array>
#include <iterator>

namespace lowbit::cpu {

#define LOWBIT_OP(op, Args) std::span<const Kernel<Args>> op##_rows();
#define LOWBIT_CPU_ISA(isa) \
  namespace isa {           \
  LOWBIT_OPS(LOWBIT_OP)     \
  }
#include "cpu/isas.inc"
#undef LOWBIT_CPU_ISA
#undef LOWBIT_OP

std::span<const Backend* const> backends() {
  static const Backend all[] = {
#define LOWBIT_OP(op, Args) op##_rows(),
#define LOWBIT_CPU_ISA(isa)                               \
  [] {                                                    \
    using namespace isa;                                  \
    return Backend{#isa, Isa::isa, LOWBIT_OPS(LOWBIT_OP)}; \
  }(),
#include "cpu/isas.inc"
#undef LOWBIT_CPU_ISA
#undef LOWBIT_OP
  };
  static const auto pointers = [] {
    std::array<const Backend*, std::size(all)> list{};
    for (std::size_t i = 0; i < list.size(); i++) list[i] = &all[i];
    return list;
  }();
  return pointers;
}

}  // namespace lowbit::cpu
