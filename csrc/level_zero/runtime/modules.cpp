// SPDX-License-Identifier: Apache-2.0
// The files of level_zero/spirv, which are in the library as they are.
#include "level_zero/runtime/columns.hpp"
#include "level_zero/runtime/program.hpp"

// Made by CMake: LOWBIT_MODULE(name, path) for each.
#define LOWBIT_MODULE(name, path)                                                                     \
  __asm__(".pushsection .rodata\nlowbit_spirv_" #name ":\n.incbin \"" path                 \
          "\"\nlowbit_spirv_" #name "_end:\n.popsection\n");                                            \
  extern "C" __attribute__((visibility("hidden"))) const uint8_t lowbit_spirv_##name[], lowbit_spirv_##name##_end[];
#include "level_zero/modules.inc"
#undef LOWBIT_MODULE

namespace lowbit::level_zero {
namespace {

struct NamedModule {
  std::string_view name;
  const uint8_t *begin, *end;
};

#define LOWBIT_MODULE(name, path) {#name, lowbit_spirv_##name, lowbit_spirv_##name##_end},
constexpr NamedModule kModules[] = {
#include "level_zero/modules.inc"
};
#undef LOWBIT_MODULE

}  // namespace

std::vector<uint32_t> module_words(std::string_view name) {
  for (const NamedModule& module : kModules)
    if (module.name == name) return from_columns({module.begin, module.end});
  return {};
}

std::vector<std::string_view> module_names() {
  std::vector<std::string_view> names;
  for (const NamedModule& module : kModules) names.push_back(module.name);
  return names;
}

}  // namespace lowbit::level_zero
