// SPDX-License-Identifier: Apache-2.0
// Kernels of one source text on one device: found in the cache on disk or compiled, loaded once per process and device.
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
  std::string name;  // for people: in errors and in the line that a compilation prints
  std::string text;
};

class Program {
 public:
  Program(std::string name, Module module) : name_(std::move(name)), module_(module) {}

  // A kernel by its name in the source; `args` is the struct that it takes, `shared_bytes` its dynamic shared memory,
  // the same in every launch. Nothing is waited for.
  void launch(const Place& place, const char* kernel, int64_t ctas, int threads, const void* args,
              int shared_bytes = 0) const;
  // The same of a kernel that waits itself for those before it (device/early.cuh), where the device can.
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

// Stands for a source in this process: its kind, and its numbers. A text as key would be made in every call.
using SourceKey = std::array<int64_t, 5>;

// The source is asked for only if this process has not loaded it on the device of the place.
// An Error while the stream is captured and it is not loaded, or LOWBIT_JIT=0 and it is not in the cache.
const Program& program(const Place& place, const SourceKey& key, const std::function<Source()>& source);

// Compiles into the cache, for another machine; returns the file, and NVRTC's log.
struct Prebuilt {
  std::string path, log;
};
LOWBIT_API Prebuilt prebuild(const Source& source, const std::string& architecture);

}  // namespace lowbit::cuda
