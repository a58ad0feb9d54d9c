// SPDX-License-Identifier: Apache-2.0
// encode_state and decode_state: float32 values to codes and scales as a step would store them, and back.
#pragma once

#include "gpu/optim/moments.cuh"

namespace lowbit::gpu {

template <StateFormat kFormat, bool kSigned, int kBlock, int kEach = elements_each(kBlock)>
struct Convert {
  static constexpr int n = kEach;

  LOWBIT_INLINE static int64_t first_element() {
    return (static_cast<int64_t>(blockIdx.x) * kStepThreads + threadIdx.x) * n;
  }

  LOWBIT_INLINE static void encode(const ConvertArgs& args) {
    LOWBIT_SHARED(int32_t, warps, [kStepWarps]);
    const int64_t at = first_element(), left = args.numel - at;
    f32 value[n];
    load_floats(args.values, DType::float32, at, left, value);
    i32 bits{0}, code[n];
#pragma unroll
    for (int i = 0; i < n; i++) {
      if constexpr (!kSigned) value[i] = max(f32{0.0f}, value[i]);  // nan stays
      bits = max(bits, bits_of(abs(value[i])));
    }
    const float scale = encode_values<kFormat, kSigned>(largest_of_block<kBlock / n>(bits.lane, warps), 1.0f, value,
                                                        code);
    store_codes<kFormat>(args.codes, at, left, code, Codes<kFormat, kSigned>::kOffset);
    if (left > 0 && at % kBlock == 0) args.scale[at / kBlock] = scale;
  }

  LOWBIT_INLINE static void decode(const ConvertArgs& args) {
    const int64_t at = first_element(), left = args.numel - at;
    f32 number[n], value[n];
    load_codes<kFormat>(args.codes, at, left, number);
    const typename Codes<kFormat, kSigned>::Decoder decode(
        scale_at<kBlock>(args.scale, at, args.numel));
#pragma unroll
    for (int i = 0; i < n; i++) {
      f32 factor;
      decode(number[i], value[i], factor);
      value[i] = mul(value[i], factor);
    }
    store_floats(args.values, DType::float32, at, left, value);
  }
};

}  // namespace lowbit::gpu
