// SPDX-License-Identifier: Apache-2.0
// Parallel regions, and threads that serve many of them in a row (parallel.cpp).
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>

#include "core/crowded_cores.hpp"
#include "core/os.hpp"

namespace lowbit {
namespace {

// A region in flight: its function, and the first error of any thread.
struct Region {
  void (*body)(void*, int);
  void* context;
  std::atomic<bool> failed{false};
  std::exception_ptr error{};
  int64_t caller_done = 0;  // when the caller had no part left, in ticks; 0: not measured

  void run(int thread) noexcept {
    try {
      body(context, thread);
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
    }
  }
};

// The leader opens regions and runs part 0 of each. The others spin until a region opens, and take the remaining
// parts. No thread waits for one that has not taken a part: if another process occupies its core, the leader does all
// of the work.
class Team {
 public:
  explicit Team(int threads) : threads_(threads) {}

  // The team led by this thread, or null.
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
    int left = threads - 1;  // parts for the others
    while (const int part = take()) region.run(part), left--;
    for (Patience patience; finished_.load(std::memory_order_acquire) < left;)
      if (!patience.spin(kCallerLooks)) return sleep_until(left);
  }

  void follow() {
    for (Patience patience; !over_.load(std::memory_order_acquire);) {
      if (const int part = take()) {
        region_->run(part);
        finished_.fetch_add(1);
        if (sleeps_.load()) os::wake(finished_);
        patience = {};
      } else if (!patience.spin(kLooks)) {
        std::this_thread::yield();
      }
    }
  }

  void end() { over_.store(true, std::memory_order_release); }

 private:
  // A thread spins for 0.1 ms, longer than the gap between two regions of a team, then yields its core. The leader spins
  // for 0.4 ms and then sleeps: the thread that it waits for has no core, and if the leader yielded, other processes would
  // get a time slice before each look.
  static constexpr int kLooks = 2500, kCallerLooks = 10000;
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield\n\tisb" ::: "memory");  // most cores skip yield; isb takes about as long as x86's pause
#endif
  }
  struct Patience {
    int looks = 0;
    bool spin(int max) {
      if (looks >= max) return false;
      looks++, pause();
      return true;
    }
  };

  void sleep_until(int left) {
    const int64_t begin = ticks();
    sleeps_.store(true);
    for (int finished; (finished = finished_.load()) < left;) os::sleep_while(finished_, finished);
    sleeps_.store(false);
    CrowdedCores::instance().waited(ticks() - begin);
  }

  // Takes a part of the region; 0 if none is left. The region's number is in the same word, so that a thread that looks
  // at one region cannot take a part of the next.
  int take() {
    uint64_t seen = next_.load(std::memory_order_acquire);
    while (const auto part = static_cast<uint32_t>(seen))
      if (next_.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel)) return static_cast<int>(part);
    return 0;
  }

  const int threads_;
  Region* region_ = nullptr;
  // On cache lines of their own: the leader writes them while the others poll them.
  alignas(64) std::atomic<uint64_t> next_{0};  // number of the region; the highest part left, 0 for none
  std::atomic<bool> over_{false};
  alignas(64) std::atomic<int> finished_{0};  // parts that the others have finished
  std::atomic<bool> sleeps_{false};           // the leader, until more of them are
};

}  // namespace
}  // namespace lowbit
