// SPDX-License-Identifier: Apache-2.0
// The words of cuda/device/prelude.cuh for the sources of csrc/gpu, on the host. Included by cuda_on_host.hpp.
#pragma once

namespace lowbit::gpu {

inline float float_of_half(uint32_t bits) {
  const uint32_t magnitude = bits & 0x7fff;
  const float value = magnitude >= 0x7c00 ? (magnitude == 0x7c00 ? HUGE_VALF : NAN)
                      : magnitude < 0x400 ? std::ldexp(static_cast<float>(magnitude), -24)
                                          : std::ldexp(static_cast<float>(magnitude % 0x400 + 0x400),
                                                       static_cast<int>(magnitude / 0x400) - 25);
  return bits & 0x8000 ? -value : value;
}

inline uint32_t pair_of_bf16(float low, float high) {
  const auto rounded = [](float a) {
    const auto bits = __builtin_bit_cast(uint32_t, a);
    return a != a ? 0x7fffu : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  };
  return rounded(low) | rounded(high) << 16;
}
inline uint32_t pair_of_f16(float low, float high) {
  const auto rounded = [](float a) -> uint32_t {
    const auto half = static_cast<_Float16>(a);
    return a != a ? 0x7fffu : __builtin_bit_cast(uint16_t, half);
  };
  return rounded(low) | rounded(high) << 16;
}

inline void fail() {
  on_host::failed = true;
  on_host::wait(on_host::State::done);
}

}  // namespace lowbit::gpu

namespace lowbit::cuda {

using namespace gpu;

}  // namespace lowbit::cuda
