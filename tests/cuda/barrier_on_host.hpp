// SPDX-License-Identifier: Apache-2.0
// cuda/device/barrier.cuh on the host. A copy is made while some thread waits for a barrier, as a coin falls.
// Included by cuda_on_host.hpp.
#pragma once

namespace lowbit::cuda {

struct Barrier;

void set_up(Barrier& barrier, int arrivals);
inline void show_barriers() {}
void arrive(Barrier& barrier);
void arrive_expecting(Barrier& barrier, int bytes);
void arrive_with_copies(Barrier& barrier);
void copy_bulk(void* to, const void* from, int bytes, Barrier& barrier);
void wait_for(const Barrier& barrier, int phase);

}  // namespace lowbit::cuda
