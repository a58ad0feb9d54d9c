// SPDX-License-Identifier: Apache-2.0
// Whether other processes take the cores that the threads of a parallel region need.
//
// The caller of a region of torch's (OpenMP) waits, spinning, until every thread has taken part, also for one that has
// no core at that moment: 4 to 10 ms, a time slice of the other process, for a region of 10 us. So callers measure how
// long they wait. Once that is a fifth of the time, regions run for 1 to 4 s on our own pool, whose caller waits for
// nobody that has not begun; then torch's threads are tried again.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace lowbit {
namespace {

inline int64_t ticks() {
#if defined(__x86_64__)
  return static_cast<int64_t>(__builtin_ia32_rdtsc());  // 8 ns, where a clock takes 45 (virtual machine of Zen 5)
#else
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1) * 3;
#endif
}
constexpr int64_t kMillisecond = 3'000'000;  // in ticks; a nanosecond has 2 to 4

class CrowdedCores {
 public:
  static CrowdedCores& instance() {
    static constinit CrowdedCores cores;
    return cores;
  }

  bool now() const {
    const int64_t until = until_.load(std::memory_order_relaxed);
    return until && ticks() < until;
  }

  // A caller had nothing to do for so long. Up to a millisecond it may have waited for the last task of a thread.
  void waited(int64_t time) {
    if (time < kMillisecond) return;
    const int64_t at = ticks();
    int64_t begin = begin_.load(std::memory_order_relaxed);
    if (at - begin > kWindow && begin_.compare_exchange_strong(begin, at - time, std::memory_order_relaxed))
      waited_.store(0, std::memory_order_relaxed);
    const int64_t more = std::min(time, kSlice);  // a pause of the whole machine is one event
    const int64_t sum = waited_.fetch_add(more, std::memory_order_relaxed) + more;
    const bool again = at - until_.load(std::memory_order_relaxed) < kMinRest;  // nothing has changed, so one event says it
    if (sum <= (again ? kWindow / 20 : kWindow / 5) || now()) return;
    const int64_t rest = again ? std::min(2 * rest_.load(std::memory_order_relaxed), kMaxRest) : kMinRest;
    rest_.store(rest, std::memory_order_relaxed);
    until_.store(at + rest, std::memory_order_relaxed);
    begin_.store(0, std::memory_order_relaxed);
  }

  void forget() { until_ = 0, begin_ = 0; }

 private:
  static constexpr int64_t kWindow = 100 * kMillisecond, kSlice = 10 * kMillisecond;
  static constexpr int64_t kMinRest = 1000 * kMillisecond, kMaxRest = 4000 * kMillisecond;

  std::atomic<int64_t> until_{0};  // torch's threads are tried again then
  std::atomic<int64_t> rest_{kMinRest};
  std::atomic<int64_t> begin_{0}, waited_{0};  // begin of the window, and how long callers waited in it
};

}  // namespace
}  // namespace lowbit
