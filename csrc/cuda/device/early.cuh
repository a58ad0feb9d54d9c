// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch (Program::launch_early), from compute capability 9.0 on: a kernel may start before the
// kernels ahead of it in the stream have finished, which hides the 4 us of its launch (Hopper). Tests implement each
// instruction on the host.
//
// Such a kernel must wait for its predecessors before it accesses global memory: its inputs may not be written yet, and
// its outputs may reuse memory that is still being read. Until then it may prefetch its inputs to L2, which is coherent
// with later writes.
#pragma once

#include "cuda/device/prelude.cuh"

#ifdef __CUDACC_RTC__
namespace lowbit::cuda {

// Allows the next kernel in the stream to start, if it was launched early and fits beside this one.
LOWBIT_INLINE void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Called by every thread. Returns once all preceding kernels have finished and their writes are visible.
LOWBIT_INLINE void wait_for_kernels_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Called by one thread. Address and size are multiples of 16 bytes.
LOWBIT_INLINE void prefetch_to_l2(const void* from, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(from), "r"(bytes));
#endif
}

}  // namespace lowbit::cuda
#endif

namespace lowbit::cuda {

// The first call of a kernel that has nothing to prefetch.
LOWBIT_INLINE void begin_early() {
  let_next_begin();
  wait_for_kernels_before();
}

}  // namespace lowbit::cuda
