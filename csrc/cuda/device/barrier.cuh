// SPDX-License-Identifier: Apache-2.0
// Bulk copies by the copy engine, and barriers in shared memory that track them, from compute capability 9.0 on. Tests
// implement each instruction on the host.
//
// A barrier has phases 0, 1, 0 ... A phase is over once as many threads have arrived as the barrier counts, and the
// bytes that they announced have arrived.
#pragma once

#include "cuda/device/tiles.cuh"

namespace lowbit::cuda {
struct alignas(8) Barrier {
  uint32_t words[2];
};
}  // namespace lowbit::cuda

#ifdef __CUDACC_RTC__
namespace lowbit::cuda {

// Called by one thread; __syncthreads makes it visible to others.
LOWBIT_INLINE void set_up(Barrier& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}
LOWBIT_INLINE void show_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

LOWBIT_INLINE void arrive(Barrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(&barrier)) : "memory");
}
LOWBIT_INLINE void arrive_expecting(Barrier& barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(shared_address(&barrier)), "r"(bytes) : "memory");
}
// Arrives once all copies (copy_async) started by this thread are complete.
LOWBIT_INLINE void arrive_with_copies(Barrier& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(shared_address(&barrier)) : "memory");
}
// Addresses and size are multiples of 16 bytes.
LOWBIT_INLINE void copy_bulk(void* to, const void* from, int bytes, Barrier& barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(&barrier)) : "memory");
}
// Waits for the end of a phase, the previous or the current one; phase 1 of a new barrier is over.
LOWBIT_INLINE void wait_for(const Barrier& barrier, int phase) {
  asm volatile("{.reg .pred over; again: mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1; @!over bra again;}"
               :: "r"(shared_address(&barrier)), "r"(phase) : "memory");
}

}  // namespace lowbit::cuda
#endif
