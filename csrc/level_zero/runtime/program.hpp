// SPDX-License-Identifier: Apache-2.0
// A module of SPIR-V on one device, built once for a process.
#pragma once

#include <map>
#include <mutex>
#include <span>
#include <string>
#include <string_view>

#include "level_zero/runtime/device.hpp"

namespace lowbit::level_zero {

class Program {
 public:
  Program(std::string name, ze::Module module) : name_(std::move(name)), module_(module) {}

  // A kernel by its name in the source; `args` is the struct that it takes, with addresses of the device in it.
  void launch(const Place& place, const char* kernel, int64_t groups, int threads, const void* args,
              std::size_t bytes) const;

 private:
  ze::Kernel kernel(const char* name) const;

  std::string name_;
  ze::Module module_;
  mutable std::mutex mutex_;  // a kernel has one set of arguments
  mutable std::map<std::string, ze::Kernel, std::less<>> kernels_;
};

// One of the library's modules (csrc/level_zero/spirv); with its constants (specialise.hpp); or linked with a module
// of functions, kept by its words. RuntimeError with the compiler's words where the device does not take it.
const Program& program(const Place& place, std::string_view module);
const Program& program(const Place& place, std::string_view module, std::span<const int32_t> constants);
const Program& program(const Place& place, std::string_view module, std::span<const uint32_t> functions);

}  // namespace lowbit::level_zero
