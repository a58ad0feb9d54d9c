// SPDX-License-Identifier: Apache-2.0
// 10^6 calls of an op from 4 threads, while a fifth one holds a call open: started by tests/recorder/test_ring.py.
// Prints what the ring says of them.
#include <cstdio>
#include <thread>
#include <vector>

#include "core/place.hpp"
#include "ops/quantize.hpp"
#include "recorder/dispatch.hpp"
#include "recorder/ring.hpp"

using namespace lowbit;

int main() {
  constexpr int kThreads = 4, kCalls = 250000;
  const Place place{};
  recorder::Dispatch held("held", "held_row", place, Call{});
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; i++)
    threads.emplace_back([] {
      float value = 1;
      TensorView view{.data = &value, .dtype = DType::float32, .rank = 1};
      view.shape[0] = 1, view.stride[0] = 1;
      for (int call = 0; call < kCalls; call++) all_finite(view);
    });
  for (std::thread& thread : threads) thread.join();
  const recorder::Ring& ring = *recorder::ring();
  int kept = 0, started = 0;
  uint64_t lowest = UINT64_MAX;
  for (uint32_t i = 0; i < ring.header->capacity; i++) {
    const recorder::Record& record = ring.records[i];
    if (!recorder::is_whole(record.mark)) continue;
    kept++;
    if (record.state == recorder::State::started) started++;
    else if (record.mark - 1 < lowest) lowest = record.mark - 1;
  }
  std::printf("calls %llu kept %d started %d lost %llu behind %d\n",
              static_cast<unsigned long long>(ring.header->next & recorder::kSequenceMask), kept, started,
              static_cast<unsigned long long>(ring.header->lost.load()),
              static_cast<int>((ring.header->next & recorder::kSequenceMask) - lowest <= 2 * ring.header->capacity));
  held.finished();
}
