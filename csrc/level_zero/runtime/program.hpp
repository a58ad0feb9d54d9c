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
#include "level_zero/runtime/driver.hpp"

namespace lowbit::level_zero {

class Program {
 public:
  Program(std::string name, Module module) : name_(std::move(name)), module_(module) {}

  // A kernel by its name, given one struct; behind all that the device was given before. Nothing is waited for.
  void launch(const Place& place, const char* kernel, int64_t groups, int threads, const void* args,
              std::size_t bytes) const;

 private:
  std::string name_;
  Module module_;
  mutable std::mutex mutex_;
  mutable std::map<std::string, KernelHandle, std::less<>> kernels_;
};

// How a module is built.
struct Build {
  std::span<const int32_t> constants = {};  // values by number (runtime/specialise.hpp)
  std::span<const uint32_t> mods = {};      // a module of the functions that it imports (score/spirv.hpp)
  bool large_registers = false;             // twice as many registers for half as many threads at once
};

// One of the library's modules.
const Program& program(const Place& place, std::string_view module, const Build& build = {});

// The words of a module of the library by its name; empty if there is none.
LOWBIT_API std::vector<uint32_t> module_words(std::string_view name);
LOWBIT_API std::vector<std::string_view> module_names();

}  // namespace lowbit::level_zero
