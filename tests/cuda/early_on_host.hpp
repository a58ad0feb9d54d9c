// SPDX-License-Identifier: Apache-2.0
// cuda/device/early.cuh on the host. A launch fails if a thread of a kernel that begins early copies from global memory
// before it has waited, or never waits. Included by cuda_on_host.hpp.
#pragma once

namespace lowbit::cuda {

inline void let_next_begin() {}
void wait_for_kernels_before();
void prefetch_to_l2(const void* from, int bytes);

}  // namespace lowbit::cuda
