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

  LOWBIT_INLINE static int left_of(const ConvertArgs& args, int64_t at) {  // up to a thread's share
    return static_cast<int>(at >= args.numel ? 0 : args.numel - at < n ? args.numel - at : n);
  }
  LOWBIT_INLINE static bool is_whole(const ConvertArgs& args, int left) {
    return left >= n && is_aligned(args.values) && is_aligned(args.codes);
  }

  LOWBIT_INLINE static void encode(const ConvertArgs& args) {
    LOWBIT_SHARED(int32_t, warps, [kStepWarps]);
    const int64_t at = first_element();
    const int left = left_of(args, at);
    const bool whole = is_whole(args, left);
    RawFloats<Runs<n>> raw;
    f32 value[n];
    if (whole) raw.template load<true>(args.values, DType::float32, at, left);
    else raw.template load<false>(args.values, DType::float32, at, left);
    raw.read(DType::float32, value);
    i32 bits{0}, code[n];
#pragma unroll
    for (int i = 0; i < n; i++) {
      if constexpr (!kSigned) value[i] = max(f32{0.0f}, value[i]);  // keeps nan
      bits = max(bits, bits_of(abs(value[i])));
    }
    const float scale = encode_values<kFormat, kSigned>(largest_of_block<kBlock / n>(bits.lane, warps), 1.0f, value,
                                                        code);
    RawCodes<kFormat, Runs<n>> codes;
    codes.write(code, Codes<kFormat, kSigned>::kOffset);
    if (whole) codes.template store<true>(args.codes, at, left);
    else codes.template store<false>(args.codes, at, left);
    if (left > 0 && at % kBlock == 0) args.scale[at / kBlock] = scale;
  }

  LOWBIT_INLINE static void decode(const ConvertArgs& args) {
    const int64_t at = first_element();
    const int left = left_of(args, at);
    const bool whole = is_whole(args, left);
    RawCodes<kFormat, Runs<n>> codes;
    f32 number[n], value[n];
    if (whole) codes.template load<true>(args.codes, at, left);
    else codes.template load<false>(args.codes, at, left);
    codes.read(number);
    const typename Codes<kFormat, kSigned>::Decoder decode(
        scale_at<kBlock>(args.scale, at, args.numel));
#pragma unroll
    for (int i = 0; i < n; i++) {
      f32 factor;
      decode(number[i], value[i], factor);
      value[i] = mul(value[i], factor);
    }
    RawFloats<Runs<n>> raw;
    raw.write(DType::float32, value);
    if (whole) raw.template store<true>(args.values, DType::float32, at, left);
    else raw.template store<false>(args.values, DType::float32, at, left);
  }
};

}  // namespace lowbit::gpu
