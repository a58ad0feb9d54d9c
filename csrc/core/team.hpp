// SPDX-License-Identifier: Apache-2.0
// Regions, and threads that stay together over many of them (parallel.cpp).
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <exception>

namespace lowbit {
namespace {

// A region in flight: the function, and the first error of any thread.
struct Region {
  void (*body)(void*, int);
  void* context;
  std::atomic<bool> failed{false};
  std::exception_ptr error{};

  void run(int thread) noexcept {
    try {
      body(context, thread);
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
    }
  }
};

// One thread leads: it gives out regions, of which it runs part 0. The others wait for them, spinning, and take the
// parts that are left. No thread waits for one that has not taken a part: where another process has its core, the
// leader does all of the work itself.
class Team {
 public:
  explicit Team(int threads) : threads_(threads) {}

  // The team that this thread leads, or null.
  static Team*& current() {
    static thread_local Team* team = nullptr;
    return team;
  }

  int threads() const { return threads_; }

  void run(int threads, Region& region) {
    region_ = &region;
    finished_.store(0, std::memory_order_relaxed);
    const uint64_t number = (next_.load(std::memory_order_relaxed) >> 32) + 1;
    next_.store(number << 32 | static_cast<uint64_t>(threads - 1), std::memory_order_release);
    region.run(0);
    int left = threads - 1;  // parts that others run
    while (const int part = take()) region.run(part), left--;
    for (Patience patience; finished_.load(std::memory_order_acquire) < left;) patience.wait();
  }

  void follow() {
    for (Patience patience; !over_.load(std::memory_order_acquire);) {
      if (const int part = take()) {
        region_->run(part);
        finished_.fetch_add(1, std::memory_order_release);
        patience = {};
      } else {
        patience.wait();
      }
    }
  }

  void end() { over_.store(true, std::memory_order_release); }

 private:
  // 0.1 ms of looking, longer than the pause between two regions of a team; then others may have the core.
  struct Patience {
    int looks = 0;
    void wait() {
      if (looks < 2500) looks++, __builtin_ia32_pause();
      else sched_yield();
    }
  };

  // Takes a part of the region, for this thread alone; 0 if none is left. The number of the region is in the same word,
  // so that a look at one region takes no part of the next.
  int take() {
    uint64_t seen = next_.load(std::memory_order_acquire);
    while (const auto part = static_cast<uint32_t>(seen))
      if (next_.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel)) return static_cast<int>(part);
    return 0;
  }

  const int threads_;
  Region* region_ = nullptr;
  // The leader writes them and the others look at them all the time.
  alignas(64) std::atomic<uint64_t> next_{0};  // number of the region; the highest part that is left, 0 for none
  std::atomic<bool> over_{false};
  alignas(64) std::atomic<int> finished_{0};  // parts that others have run
};

}  // namespace
}  // namespace lowbit
