// SPDX-License-Identifier: Apache-2.0
// One backend per instruction set that was compiled; which units each one has is said in csrc/cpu/CMakeLists.txt.
#include "cpu/backend.hpp"

#include "core/isa.hpp"

namespace lowbit::cpu {

#define LOWBIT_CPU_UNIT(unit) void unit##_rows(Backend& backend);
#define LOWBIT_CPU_ISA(isa, units) \
  namespace isa {                  \
  units                            \
  }
#include "cpu/isas.inc"
#undef LOWBIT_CPU_ISA
#undef LOWBIT_CPU_UNIT

std::span<const Backend* const> backends() {
#define LOWBIT_CPU_UNIT(unit) unit##_rows(backend);
#define LOWBIT_CPU_ISA(isa, units)                                                  \
  static const Backend isa##_backend = [] {                                         \
    using namespace isa;                                                            \
    const auto unavailable = [](Device) -> const std::string& {                     \
      static const std::string reason = isa_unavailable(#isa);                      \
      return reason;                                                                \
    };                                                                              \
    Backend backend{.name = #isa, .device = DeviceType::cpu, .unavailable = unavailable}; \
    units return backend;                                                           \
  }();
#include "cpu/isas.inc"
#undef LOWBIT_CPU_ISA
#undef LOWBIT_CPU_UNIT
  static const Backend* const all[] = {
#define LOWBIT_CPU_ISA(isa, units) &isa##_backend,
#include "cpu/isas.inc"
#undef LOWBIT_CPU_ISA
  };
  return all;
}

}  // namespace lowbit::cpu
