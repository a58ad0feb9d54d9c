// SPDX-License-Identifier: Apache-2.0
#include "level_zero/runtime/modules.hpp"

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <span>

// Made by CMake: LOWBIT_MODULE(name, path) for each, in the library as tools/spirv packed it.
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
constexpr NamedModule kModulesAndEnd[] = {
#include "level_zero/modules.inc"
    {}};
#undef LOWBIT_MODULE
constexpr std::span kModules(kModulesAndEnd, std::size(kModulesAndEnd) - 1);  // none in a build without the tools

constexpr uint32_t kLastPlace = 8;  // of operands; tools/spirv has the same

// A varint: 7 bits a byte, the lowest first.
uint32_t next(const uint8_t*& from) {
  uint32_t number = 0;
  for (int shift = 0;; shift += 7) {
    const uint8_t byte = *from++;
    number |= static_cast<uint32_t>(byte & 127) << shift;
    if (byte < 128) return number;
  }
}

std::vector<uint32_t> unpacked(const uint8_t* from, const uint8_t* end) {
  std::vector<uint32_t> words(5);
  for (uint32_t& word : words) word = next(from);
  std::map<uint32_t, std::array<uint32_t, kLastPlace + 1>> last;  // operands of each operation
  while (from < end) {
    const uint32_t operation = next(from), count = next(from);
    words.push_back(count << 16 | operation);
    auto& operands = last[operation];
    for (uint32_t k = 1; k < count; k++) {
      const uint32_t difference = next(from);
      words.push_back(operands[std::min(k, kLastPlace)] += difference & 1 ? ~(difference >> 1) : difference >> 1);
    }
  }
  return words;
}

}  // namespace

std::vector<uint32_t> module_words(std::string_view name) {
  for (const NamedModule& module : kModules)
    if (module.name == name) return unpacked(module.begin, module.end);
  return {};
}

std::vector<std::string_view> module_names() {
  std::vector<std::string_view> names;
  for (const NamedModule& module : kModules) names.push_back(module.name);
  return names;
}

std::string_view modules_compiler() { return LOWBIT_MODULES_BY; }

const std::string& modules_missing() {
  constexpr std::string_view kMissing =
      "this build has no SPIR-V modules: install clang, llvm and llvm-spirv of one version from 15 on and spirv-tools "
      "(Debian 12: apt install clang-15 llvm-15 llvm-spirv-15 spirv-tools), then build lowbit again";
  static const std::string& reason = *new std::string(kModules.empty() ? kMissing : "");
  return reason;
}

}  // namespace lowbit::level_zero
