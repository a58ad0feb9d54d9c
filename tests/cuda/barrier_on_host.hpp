// SPDX-License-Identifier: Apache-2.0
// cuda/device/barrier.cuh on the host. A copy is made while some thread waits for a barrier, as a coin falls.
// Included by cuda_on_host.hpp.
#pragma once

namespace on_host {

struct BarrierState {  // as it lies in shared memory
  int16_t arrivals, missing;
  int32_t bytes : 31;
  uint32_t phase : 1;
};
static_assert(sizeof(BarrierState) == 8);

inline void end_launch(const char* why) {
  std::fprintf(stderr, "emulated CUDA: %s\n", why);
  failed = true, wait(State::done);
}
inline BarrierState& state_of(const void* barrier) {
  return *static_cast<BarrierState*>(const_cast<void*>(barrier));
}
inline void end_phase_if_over(BarrierState& barrier) {
  if (barrier.missing == 0 && barrier.bytes == 0) barrier.missing = barrier.arrivals, barrier.phase ^= 1;
}

}  // namespace on_host

namespace lowbit::cuda {

struct Barrier;

inline void set_up(Barrier& barrier, int arrivals) {
  on_host::state_of(&barrier) = {static_cast<int16_t>(arrivals), static_cast<int16_t>(arrivals), 0, 0};
}
inline void show_barriers() {}
inline void arrive(Barrier& barrier) {
  auto& state = on_host::state_of(&barrier);
  if (state.missing-- <= 0) on_host::end_launch("more threads arrive than a barrier counts");
  on_host::end_phase_if_over(state);
}
inline void arrive_expecting(Barrier& barrier, int bytes) {
  on_host::state_of(&barrier).bytes += bytes;
  arrive(barrier);
}
inline void arrive_with_copies(Barrier& barrier) {
  auto& copies = on_host::fibers[on_host::current].copies;
  on_host::bulk_copies.push_back([copies, &barrier] {
    for (const auto& copy : copies) make(copy);
    arrive(barrier);
  });
  copies.clear();
}
inline void copy_bulk(void* to, const void* from, int bytes, Barrier& barrier) {
  check_aligned(to, "copy to shared memory"), check_aligned(from, "copy from global memory");
  if (bytes % 16) std::fprintf(stderr, "a copy of %d bytes\n", bytes), std::abort();
  on_host::bulk_copies.push_back([=, state = &on_host::state_of(&barrier)] {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
    state->bytes -= bytes;
    on_host::end_phase_if_over(*state);
  });
}
inline void wait_for(const Barrier& barrier, int phase) {
  for (int tries = 0; static_cast<int>(on_host::state_of(&barrier).phase) == phase; tries++) {
    auto& copies = on_host::bulk_copies;
    if (!copies.empty() && on_host::coins() & 256) {
      const std::size_t i = on_host::coins() / 256 % copies.size();
      copies[i]();
      copies.erase(copies.begin() + static_cast<std::ptrdiff_t>(i));
    } else if (tries == 100000) {
      on_host::end_launch("a thread waits for a barrier for ever");
    } else {
      on_host::wait(on_host::State::runs);
    }
  }
}

}  // namespace lowbit::cuda
