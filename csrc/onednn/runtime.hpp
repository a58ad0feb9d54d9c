// SPDX-License-Identifier: Apache-2.0
// oneDNN in this process: the library, opened on first use, and its threads.
#pragma once

#include <string>

#include "core/library.hpp"
#include "core/place.hpp"
#include "onednn/api.hpp"

namespace lowbit::onednn {

struct Api {
  LOWBIT_ONEDNN_FUNCTIONS(LOWBIT_FUNCTION_MEMBER)
  std::size_t (*desc_bytes)(const MemoryDescHandle*);
};

const Api& api();  // RuntimeError if unavailable

// Functions of the OpenMP runtime that the library was built with; null in a sequential build.
struct OpenMP {
  void (*set_num_threads)(int) = nullptr;
  int (*get_max_threads)() = nullptr;
  int (*in_parallel)() = nullptr;
};

// The CPU's engine, and the OpenMP that serves it.
struct Runtime {
  Engine engine;
  OpenMP openmp;
};
const Runtime& runtime();  // RuntimeError if unavailable

// The path and version of the library, or why it cannot be used; opens it.
struct Facts {
  std::string path, version, reason;
};
LOWBIT_API const Facts& facts();
const std::string& unavailable(Device device);

// Checks the status of a call that must not fail.
void ensure(int status, std::string_view function);

// The thread count of one call, for which primitives are created and run: that of lowbit's own kernels at this point,
// or one if OpenMP cannot give more (in a parallel region, in a forked child).
class Threads {
 public:
  Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;
  ~Threads();
  int count() const { return count_; }

 private:
  int before_ = 0, count_ = 1;
};

}  // namespace lowbit::onednn
