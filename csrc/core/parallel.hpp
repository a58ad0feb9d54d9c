// SPDX-License-Identifier: Apache-2.0
// Threads: torch's own if torch >= 2.10 is loaded (torch_parallel_for, found by dlsym, so that set_num_threads,
// DataLoader workers and nested regions behave as for any torch op), else a small pool of our own. No OpenMP.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <type_traits>

#include "core/error.hpp"

namespace lowbit {

LOWBIT_API int num_threads();             // max threads of a parallel region at present
// How many threads this many products justify. A parallel region costs 2 to 5 us on Zen 5 (20 if busy), as much as
// kSerialProducts on one AVX2 core; a region of a team (as_team) costs an eighth of that.
constexpr int64_t kSerialProducts = 1 << 18;
// Where other processes occupy the cores (crowded_cores.hpp), a thread is without one for 4 to 10 ms at a time, and what
// its caller does alone in that time is done sooner alone.
constexpr int64_t kCrowdedProducts = 1 << 30;
LOWBIT_API int threads_worth(int64_t products);
LOWBIT_API std::string threads_source();  // "torch_parallel_for", or "own pool (why)"

// Calls body(context, thread) for thread = 0..threads-1, each on its own thread if there are enough, and returns when
// all are done. The first exception is rethrown on the caller's thread.
LOWBIT_API void parallel_region(int threads, void (*body)(void* context, int thread), void* context);

// While cores are crowded (crowded_cores.hpp), torch's ops run on this thread alone until the object goes: most of them
// take less than a time slice, for which OpenMP's region may wait. For torch's ops between ours.
class OnCallerIfCrowded {
 public:
  LOWBIT_API OnCallerIfCrowded();
  LOWBIT_API ~OnCallerIfCrowded();
  OnCallerIfCrowded(const OnCallerIfCrowded&) = delete;

 private:
  int before_ = 0;  // threads of OpenMP for regions of this thread; 0: not changed
};

// Calls body(context) with a team of threads that wait between its parallel regions. For many short regions: one of
// torch's costs as much as a small product.
LOWBIT_API void as_team(void (*body)(void* context), void* context);

template <class Body>
void as_team(Body&& body) {
  as_team([](void* context) { (*static_cast<std::remove_reference_t<Body>*>(context))(); }, &body);
}

template <class Body>
void parallel(int threads, Body&& body) {
  if (threads <= 1) return body(0);
  parallel_region(
      threads, [](void* context, int thread) { (*static_cast<std::remove_reference_t<Body>*>(context))(thread); },
      &body);
}

// Calls body(task) for task = 0..tasks-1. Each thread has a contiguous range, for memory locality, and takes one task
// at a time from it, then from the other ranges once its own is empty: a slow core or a busy hyperthread takes fewer.
template <class Body>
void parallel_for(int64_t tasks, int threads, Body&& body) {
  if (threads > tasks) threads = static_cast<int>(tasks);
  if (threads <= 1) {
    for (int64_t task = 0; task < tasks; task++) body(task);
    return;
  }
  struct alignas(64) Range {
    std::atomic<int64_t> next;
    int64_t end;
  };
  constexpr int kMaxRanges = 64;  // further threads share them
  const int ranges = threads < kMaxRanges ? threads : kMaxRanges;
  Range range[kMaxRanges];
  for (int i = 0; i < ranges; i++) {
    range[i].next.store(tasks * i / ranges, std::memory_order_relaxed);
    range[i].end = tasks * (i + 1) / ranges;
  }
  parallel(threads, [&](int thread) {
    for (int i = 0; i < ranges; i++) {
      Range& from = range[(thread + i) % ranges];
      for (int64_t task; (task = from.next.fetch_add(1, std::memory_order_relaxed)) < from.end;) body(task);
    }
  });
}

}  // namespace lowbit
