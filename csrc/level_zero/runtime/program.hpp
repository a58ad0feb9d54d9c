// SPDX-License-Identifier: Apache-2.0
// SPIR-V modules (modules.hpp), specialised and built for one device, once per process; the driver's code is
// cached on disk.
#pragma once

#include <map>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "core/place.hpp"
#include "level_zero/runtime/driver.hpp"

namespace lowbit::level_zero {

struct Image {
  std::string name;
  std::vector<std::vector<uint32_t>> modules;  // the module of the kernels, then those linked to it
};

class Program {
 public:
  Program(const Gpu& on, Image image);

  // Launches a kernel by its name, with one struct as its argument, after all earlier work of the device.
  // Does not wait.
  void launch(const Place& place, const char* kernel, int64_t groups, int threads, const void* args,
              std::size_t bytes) const;

 private:
  KernelHandle make(const char* kernel) const;

  const Gpu& on_;
  Image image_;
  mutable Module modules_[2];  // the second with large registers, if a kernel of the first has spilled
  mutable std::mutex mutex_;
  mutable std::map<std::string, KernelHandle, std::less<>> kernels_;
};

// How a module is built.
struct Build {
  std::span<const int32_t> constants = {};  // values by number (runtime/specialise.hpp)
  // A module with functions that it imports (score/spirv.hpp). The module score_ops comes with it.
  std::span<const uint32_t> mods = {};
};

// One of the library's modules.
const Program& program(const Place& place, std::string_view module, const Build& build = {});

}  // namespace lowbit::level_zero
