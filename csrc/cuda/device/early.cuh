// SPDX-License-Identifier: Apache-2.0
// Kernels that begin early (Program::launch_early): from compute capability 9.0 on, before those before them in their
// stream have ended, so that the 4 us that a launch takes lie behind their end. Tests give each instruction a meaning
// on the host.
//
// Such a kernel waits for the others before it reads or writes global memory: what it reads may not be there yet, and
// what it writes, memory of torch that is used again, may still be read. Until then it may ask L2 for what it will
// read, since L2 sees later writes.
#pragma once

#include "cuda/device/prelude.cuh"

#ifdef __CUDACC_RTC__
namespace lowbit::cuda {

// Lets the next kernel begin, if it begins early, where there is room beside this one.
LOWBIT_INLINE void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// By every thread. They have ended then, and what they wrote is there.
LOWBIT_INLINE void wait_for_kernels_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// By one thread: an address and a number of bytes that are multiples of 16.
LOWBIT_INLINE void prefetch_to_l2(const void* from, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(from), "r"(bytes));
#endif
}

}  // namespace lowbit::cuda
#endif

namespace lowbit::cuda {

// The first thing that a kernel does that has nothing to ask L2 for.
LOWBIT_INLINE void begin_early() {
  let_next_begin();
  wait_for_kernels_before();
}

}  // namespace lowbit::cuda
