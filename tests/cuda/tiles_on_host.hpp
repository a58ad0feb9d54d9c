// SPDX-License-Identifier: Apache-2.0
// The instructions of cuda/device/tiles.cuh on the host. Copies to shared memory are made at the worst of times: when
// they are waited for, or at once, as a coin falls. Included by cuda_on_host.hpp.
#pragma once

namespace lowbit::cuda {

void load_matrices(uint32_t (&to)[4], const uint16_t* row);
void load_transposed(uint32_t (&to)[4], const uint16_t* row, uint32_t bytes = 0);

void copy_async(uint16_t* to, const uint16_t* from, bool is_there);
void copy_later(void* to, const void* from, unsigned bytes);  // no address: zeros
template <int kBytes = 16>
void copy_through_l1(void* to, const void* from) { copy_later(to, from, kBytes); }
void make_copies(int pending);  // of all groups but so many; -1: and of the group that has not ended
void commit_copies();
inline void wait_for_copies() { make_copies(-1); }
template <int kPending>
void wait_for_groups() { make_copies(kPending); }

void multiply_f16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

inline float power_of_2(float a) {
  const float power = exp2f(a);
  return power < 0x1p-126f ? 0.0f : power;
}
inline float reciprocal(float a) { return fabsf(a) > 0x1p126f ? 0.0f : 1.0f / a; }

}  // namespace lowbit::cuda
