// SPDX-License-Identifier: Apache-2.0
// Modules of SPIR-V that came with the library (level_zero/spirv), specialised and built for one device, each once in a
// process; what a driver made of one is kept on disk.
#pragma once

#include <map>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "core/place.hpp"
#include "formats/list.hpp"
#include "level_zero/runtime/driver.hpp"
#include "level_zero/spirv/made_of.hpp"
#include "rules/list.hpp"

namespace lowbit::level_zero {

struct Image {
  std::string name;
  std::vector<uint32_t> words, mods;
};

class Program {
 public:
  Program(const Gpu& on, Image image);

  // A kernel by its name, given one struct; behind all that the device was given before. Nothing is waited for.
  void launch(const Place& place, const char* kernel, int64_t groups, int threads, const void* args,
              std::size_t bytes) const;

 private:
  KernelHandle make(const char* kernel) const;

  const Gpu& on_;
  Image image_;
  mutable Module modules_[2];  // the second with large registers, once a kernel of the first has spilled some
  mutable std::mutex mutex_;
  mutable std::map<std::string, KernelHandle, std::less<>> kernels_;
};

// How a module is built.
struct Build {
  std::span<const int32_t> constants = {};  // values by number (runtime/specialise.hpp)
  std::span<const uint32_t> mods = {};      // a module of the functions that it imports (score/spirv.hpp)
};

// One of the library's modules.
const Program& program(const Place& place, std::string_view module, const Build& build = {});

// The words of a module of the library by its name; empty if there is none.
LOWBIT_API std::vector<uint32_t> module_words(std::string_view name);
LOWBIT_API std::vector<std::string_view> module_names();

// Why the modules do not serve a format or a rule; "" if they do. Lists grow at their ends.
constexpr std::string_view modules_lack(Format format) {
  return static_cast<int>(format) < kFormatsOfModules ? "" : "the SPIR-V modules lack this format: run tools/spirv";
}
constexpr std::string_view modules_lack(Rule rule) {
  return static_cast<int>(rule) < kRulesOfModules ? "" : "the SPIR-V modules lack this rule: run tools/spirv";
}

}  // namespace lowbit::level_zero
