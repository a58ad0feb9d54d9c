// SPDX-License-Identifier: Apache-2.0
// One backend per compiled instruction set; csrc/cpu/CMakeLists.txt lists the units of each.
#include "cpu/backend.hpp"

#include "core/isa.hpp"
#include "core/once.hpp"

namespace lowbit::cpu {

#define LOWBIT_CPU_UNIT(unit) void unit##_rows(Backend& backend);
#define LOWBIT_CPU_ISA(isa, units) \
  namespace isa {                  \
  units                            \
  }
#include "cpu/isas.inc"
#undef LOWBIT_CPU_ISA
#undef LOWBIT_CPU_UNIT

namespace {

#define LOWBIT_CPU_UNIT(unit) unit##_rows(backend);
#define LOWBIT_CPU_ISA(isa, units)                                                  \
  const Backend& isa##_backend() {                                                  \
    static std::atomic<const Backend*> kept{nullptr};                               \
    return made_once(kept, [] {                                                     \
      using namespace isa;                                                          \
      const auto unavailable = [](Device) -> const std::string& {                   \
        static std::atomic<const std::string*> reason{nullptr};                     \
        return made_once(reason, [] { return isa_unavailable(#isa); });             \
      };                                                                            \
      Backend backend{.name = #isa, .device = DeviceType::cpu, .unavailable = unavailable}; \
      units return backend;                                                         \
    });                                                                             \
  }
#include "cpu/isas.inc"
#undef LOWBIT_CPU_ISA
#undef LOWBIT_CPU_UNIT

}  // namespace

std::span<const Backend* const> backends() {
  static std::atomic<const std::vector<const Backend*>*> kept{nullptr};
  return made_once(kept, [] {
    return std::vector<const Backend*>{
#define LOWBIT_CPU_ISA(isa, units) &isa##_backend(),
#include "cpu/isas.inc"
#undef LOWBIT_CPU_ISA
    };
  });
}

}  // namespace lowbit::cpu
