// SPDX-License-Identifier: Apache-2.0
// The kernels of one source on one device: taken from the disk cache or compiled, and loaded once per
// process and device.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <mutex>
#include <string>

#include "core/place.hpp"
#include "cuda/runtime/driver.hpp"

namespace lowbit::cuda {

struct Source {
  std::string name;  // name in errors and in the line printed by a compilation
  std::string text;
};

class Program {
 public:
  Program(std::string name, Module module) : name_(std::move(name)), module_(module) {}

  // Launches a kernel by its name in the source; `args` is its argument struct, `shared_bytes` its dynamic shared
  // memory, the same in every launch. Does not wait.
  void launch(const Place& place, const char* kernel, int64_t ctas, int threads, const void* args,
              int shared_bytes = 0) const;
  // The same for a kernel that itself waits for its predecessors (device/early.cuh), if the device supports it.
  void launch_early(const Place& place, const char* kernel, int64_t ctas, int threads, const void* args,
                    int shared_bytes = 0) const;

 private:
  void launch(const Place& place, const char* kernel, int64_t ctas, int threads, const void* args, int shared_bytes,
              bool early) const;
  Function function(const char* kernel, int shared_bytes) const;

  std::string name_;
  Module module_;
  mutable std::mutex mutex_;
  mutable std::map<std::string, Function, std::less<>> functions_;
};

// Identifies a source in this process: its kind and its numbers. A text as key would have to be built in every call.
using SourceKey = std::array<int64_t, 5>;

// The source is requested only if this process has not loaded it on the device of the place. An Error if it is not
// loaded and the stream is being captured, or if LOWBIT_JIT=0 and it is not in the cache.
const Program& program(const Place& place, const SourceKey& key, const std::function<Source()>& source);

// Compiles into the cache, for another machine; returns the file, and NVRTC's log.
struct Prebuilt {
  std::string path, log;
};
LOWBIT_API Prebuilt prebuild(const Source& source, const std::string& architecture);

}  // namespace lowbit::cuda
