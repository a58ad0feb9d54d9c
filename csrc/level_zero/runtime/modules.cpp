// SPDX-License-Identifier: Apache-2.0
#include "level_zero/runtime/modules.hpp"

#include "core/error.hpp"

// Each file as it is, between two labels that nothing outside this object sees.
#define LOWBIT_MODULE(name, file)                                                        \
  asm(".pushsection .rodata\n.balign 16\nlowbit_spirv_" #name ":\n.incbin \"" file "\"\n" \
      "lowbit_spirv_end_" #name ":\n.popsection\n");                                     \
  extern "C" __attribute__((visibility("hidden"))) const uint32_t lowbit_spirv_##name[], lowbit_spirv_end_##name[];
#include "level_zero/modules.inc"
#undef LOWBIT_MODULE

namespace lowbit::level_zero {

std::span<const uint32_t> module_words(std::string_view name) {
#define LOWBIT_MODULE(module, file) \
  if (name == #module) return {lowbit_spirv_##module, lowbit_spirv_end_##module};
#include "level_zero/modules.inc"
#undef LOWBIT_MODULE
  throw Error(ErrorKind::runtime, concat("level_zero: there is no module ", name));
}

}  // namespace lowbit::level_zero
