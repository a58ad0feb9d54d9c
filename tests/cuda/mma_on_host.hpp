// SPDX-License-Identifier: Apache-2.0
// The instructions of cuda/device/mma.cuh on the host, as PTX describes them; sums lose what the tensor cores may: they
// are cut to float32 after each product of 16 k. Included by cuda_on_host.hpp.
#pragma once

namespace lowbit::cuda {

void multiply_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
void multiply_u8s8(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
void multiply_s8s8(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c);

inline uint32_t load_once(const uint32_t* p) { return *p; }
inline uint2 load_once(const uint2* p) {
  if (reinterpret_cast<uintptr_t>(p) % 8) fprintf(stderr, "load of 8 bytes is not aligned\n"), abort();
  return *p;
}

}  // namespace lowbit::cuda
