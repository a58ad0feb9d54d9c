// SPDX-License-Identifier: Apache-2.0
#include "recorder/clock.hpp"

#include <atomic>
#include <chrono>
#include <fstream>
#include <string>

namespace lowbit::recorder {
namespace {

uint64_t monotonic_ns() {
  const std::chrono::nanoseconds now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(now.count());
}

#if defined(__x86_64__)

uint64_t cycles() { return __builtin_ia32_rdtsc(); }

bool kernel_counts_cycles() {
  std::ifstream file("/sys/devices/system/clocksource/clocksource0/current_clocksource");
  std::string name;
  return file >> name && name == "tsc";
}

#else

uint64_t cycles() { return 0; }
bool kernel_counts_cycles() { return false; }

#endif

constexpr uint64_t kAnchored = uint64_t{1} << 30;       // max cycles from an anchor to a time read
constexpr uint64_t kShortestMeasure = 10 * 1000 * 1000;  // ns; then the rate is right to 10^-5, and improves

const bool counted = kernel_counts_cycles();
const Moment first{cycles(), monotonic_ns()};
std::atomic<uint64_t> scale{0};  // ns per cycle, times 2^32
thread_local Thread here;

uint64_t anchored_anew(Moment& anchor) {
  const Moment now{cycles(), monotonic_ns()};
  if (counted && now.ns - first.ns > kShortestMeasure && now.cycles > first.cycles) {
    const auto elapsed = static_cast<unsigned __int128>(now.ns - first.ns) << 32;
    scale.store(static_cast<uint64_t>(elapsed / (now.cycles - first.cycles)), std::memory_order_relaxed);
    anchor = now;
  }
  return now.ns;
}

}  // namespace

Thread& this_thread() { return here; }

uint64_t now_ns(Thread& thread) {
  const Moment& from = thread.anchor;
  const uint64_t elapsed = cycles() - from.cycles;
  if (from.cycles == 0 || elapsed >= kAnchored) return anchored_anew(thread.anchor);
  return from.ns + (elapsed * scale.load(std::memory_order_relaxed) >> 32);
}

}  // namespace lowbit::recorder
