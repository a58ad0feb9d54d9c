// SPDX-License-Identifier: Apache-2.0
// The files of level_zero/spirv, which are in the library as they are.
#include "level_zero/runtime/program.hpp"

// Made by CMake: LOWBIT_MODULE(name, path) for each.
#define LOWBIT_MODULE(name, path)                                                                     \
  __asm__(".pushsection .rodata\n.balign 64\nlowbit_spirv_" #name ":\n.incbin \"" path                 \
          "\"\nlowbit_spirv_" #name "_end:\n.popsection\n");                                            \
  extern "C" __attribute__((visibility("hidden"))) const uint32_t lowbit_spirv_##name[], lowbit_spirv_##name##_end[];
#include "level_zero/modules.inc"
#undef LOWBIT_MODULE

namespace lowbit::level_zero {
namespace {

struct NamedModule {
  std::string_view name;
  const uint32_t *begin, *end;
};

#define LOWBIT_MODULE(name, path) {#name, lowbit_spirv_##name, lowbit_spirv_##name##_end},
constexpr NamedModule kModules[] = {
#include "level_zero/modules.inc"
};
#undef LOWBIT_MODULE

}  // namespace

std::span<const uint32_t> find_module(std::string_view name) {
  for (const NamedModule& module : kModules)
    if (module.name == name) return {module.begin, module.end};
  return {};
}

std::vector<std::string_view> module_names() {
  std::vector<std::string_view> names;
  for (const NamedModule& module : kModules) names.push_back(module.name);
  return names;
}

}  // namespace lowbit::level_zero
