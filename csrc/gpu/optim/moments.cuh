// SPDX-License-Identifier: Apache-2.0
// Moments between codes and float32, elements_each() of them a thread and a block of the format on neighbouring
// threads. The same codes and scales as cpu/optim/moment.hpp.
#pragma once

#include "formats/state_codes.hpp"
#include "gpu/device/vector.cuh"
#include "gpu/optim/table.hpp"

namespace lowbit::gpu {

template <StateFormat kFormat, bool kSigned>
using Codes = StateCodes<kFormat, kSigned, Table8>;

template <class Word>
LOWBIT_INLINE bool is_aligned(const void* p) { return (reinterpret_cast<std::size_t>(p) & (sizeof(Word) - 1)) == 0; }

template <int kBytes> struct WordOf;
template <> struct WordOf<2> { using type = uint16_t; };
template <> struct WordOf<4> { using type = uint32_t; };
template <> struct WordOf<8> { using type = uint2; };
template <> struct WordOf<16> { using type = uint4; };

// `count` elements, of which `left` are there, and zeros. One by one where they lie in no word: by a loop over bytes,
// Intel's newer compilers keep `to` in memory for both ways.
template <class Element, int count>
LOWBIT_INLINE void load_elements(const void* from, int64_t left, void* to) {
  using Word = typename WordOf<count * sizeof(Element)>::type;
  if (left >= count && is_aligned<Word>(from)) {
    *static_cast<Word*>(to) = *static_cast<const Word*>(from);
    return;
  }
#pragma unroll
  for (int i = 0; i < count; i++) {
    const Element element = i < left ? static_cast<const Element*>(from)[i] : Element{0};
    std::memcpy(static_cast<uint8_t*>(to) + i * sizeof element, &element, sizeof element);
  }
}
template <class Element, int count>
LOWBIT_INLINE void store_elements(void* to, int64_t left, const void* from) {
  using Word = typename WordOf<count * sizeof(Element)>::type;
  if (left >= count && is_aligned<Word>(to)) {
    *static_cast<Word*>(to) = *static_cast<const Word*>(from);
    return;
  }
#pragma unroll
  for (int i = 0; i < count; i++) {
    Element element;
    std::memcpy(&element, static_cast<const uint8_t*>(from) + i * sizeof element, sizeof element);
    if (i < left) static_cast<Element*>(to)[i] = element;
  }
}

// n elements of a tensor from `at` on, of which `left` are there, and zeros.
template <int n>
LOWBIT_INLINE void load_floats(const void* base, DType dtype, int64_t at, int64_t left, f32 (&to)[n]) {
  alignas(16) uint32_t words[n];
  if (dtype == DType::float32) {
#pragma unroll
    for (int i = 0; i < n; i += 4)
      load_elements<uint32_t, 4>(static_cast<const float*>(base) + at + i, left - i, words + i);
#pragma unroll
    for (int i = 0; i < n; i++) to[i] = {__uint_as_float(words[i])};
    return;
  }
  load_elements<uint16_t, (n < 8 ? n : 8)>(static_cast<const uint16_t*>(base) + at, left, words);
  if constexpr (n == 16) load_elements<uint16_t, 8>(static_cast<const uint16_t*>(base) + at + 8, left - 8, words + 4);
#pragma unroll
  for (int i = 0; i < n; i++) {
    const auto half = static_cast<uint16_t>(words[i / 2] >> 16 * (i % 2));
    to[i] = {dtype == DType::bfloat16 ? float_from_bfloat16(half) : float_from_float16(half)};
  }
}

template <int n>
LOWBIT_INLINE void store_floats(void* base, DType dtype, int64_t at, int64_t left, const f32 (&from)[n]) {
  alignas(16) uint32_t words[n];
  if (dtype == DType::float32) {
#pragma unroll
    for (int i = 0; i < n; i++) words[i] = __float_as_uint(from[i].lane);
#pragma unroll
    for (int i = 0; i < n; i += 4)
      store_elements<uint32_t, 4>(static_cast<float*>(base) + at + i, left - i, words + i);
    return;
  }
  const auto half = [&](int i) -> uint32_t {
    return dtype == DType::bfloat16 ? bfloat16_from_float(from[i].lane) : float16_from_float(from[i].lane);
  };
#pragma unroll
  for (int i = 0; i < n; i += 2) words[i / 2] = half(i) | half(i + 1) << 16;
  store_elements<uint16_t, (n < 8 ? n : 8)>(static_cast<uint16_t*>(base) + at, left, words);
  if constexpr (n == 16) store_elements<uint16_t, 8>(static_cast<uint16_t*>(base) + at + 8, left - 8, words + 4);
}

// n codes as the floats 2^23 + code, which decoders read; 4-bit codes two to a byte, the first in the high nibble.
template <StateFormat kFormat, int n>
LOWBIT_INLINE void load_codes(const uint8_t* codes, int64_t at, int64_t left, f32 (&number)[n]) {
  constexpr int kBytes = static_cast<int>(state_bytes(kFormat, n));
  alignas(16) uint8_t bytes[kBytes];
  load_elements<uint8_t, kBytes>(codes + state_bytes(kFormat, at), state_bytes(kFormat, left), bytes);
#pragma unroll
  for (int i = 0; i < n; i++) {
    const uint32_t code = kFormat == StateFormat::dynamic4 ? bytes[i / 2] >> (i % 2 ? 0 : 4) & 15 : bytes[i];
    number[i] = {__uint_as_float(0x4b000000u | code)};
  }
}

template <StateFormat kFormat, int n>
LOWBIT_INLINE void store_codes(uint8_t* codes, int64_t at, int64_t left, const i32 (&code)[n], int offset) {
  constexpr int kBytes = static_cast<int>(state_bytes(kFormat, n));
  alignas(16) uint8_t bytes[kBytes];
  const auto saturated = [&](int i) {
    const int32_t sum = code[i].lane + offset;
    return static_cast<uint8_t>(sum < 0 ? 0 : sum > 255 ? 255 : sum);
  };
#pragma unroll
  for (int i = 0; i < kBytes; i++) {
    if constexpr (kFormat == StateFormat::dynamic4)
      bytes[i] = static_cast<uint8_t>(saturated(2 * i) << 4 | saturated(2 * i + 1));
    else bytes[i] = saturated(i);
  }
  store_elements<uint8_t, kBytes>(codes + state_bytes(kFormat, at), state_bytes(kFormat, left), bytes);
}

// The scale of the block of element `at`, also for a thread behind the last element: it holds a part of the tables.
template <int kBlock>
LOWBIT_INLINE float scale_at(const float* scale, int64_t at, int64_t numel) {
  return at / kBlock * kBlock < numel ? scale[at / kBlock] : 0.0f;
}

constexpr int kStepWarps = kStepThreads / kWarpLanes;

// The largest of kLanes neighbouring threads, in each of them. `warps`: of this use alone until the next barrier.
template <int kLanes>
LOWBIT_INLINE int32_t largest_of_block(int32_t bits, int32_t* warps) {
#pragma unroll
  for (int step = (kLanes < kWarpLanes ? kLanes : kWarpLanes) / 2; step; step /= 2) {
    const int32_t other = __shfl_xor_sync(kWarp, bits, step);
    bits = other > bits ? other : bits;
  }
  if constexpr (kLanes > kWarpLanes) {
    constexpr int kWarps = kLanes / kWarpLanes;
    const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
    if (threadIdx.x % kWarpLanes == 0) warps[warp] = bits;
    __syncthreads();
    for (int i = 0; i < kWarps; i++) {
      const int32_t other = warps[warp / kWarps * kWarps + i];
      bits = other > bits ? other : bits;
    }
  }
  return bits;
}

// The larger bits of |value|: nan above inf. A moment that cannot be negative may still be a nan with a sign, which is
// above all if unsigned.
template <bool kSigned>
LOWBIT_INLINE i32 larger(i32 bits, f32 value) {
  return kSigned ? max(bits, bits_of(abs(value))) : max_u32(bits, bits_of(value));
}

// Codes of this thread's values, counted in `unit`s, and the scale of their block, whose largest has the bits given.
// Values that are not finite, and scales without an inverse, as in cpu/optim/moment.hpp.
template <StateFormat kFormat, bool kSigned, int n>
LOWBIT_INLINE float encode_values(int32_t absmax_bits, float unit, f32 (&value)[n], i32 (&code)[n]) {
  float absmax = __int_as_float(absmax_bits);
  float scale = __fdiv_rn(absmax * unit, Codes<kFormat, kSigned>::kAbsmaxOverScale);
  if (!(scale >= 0x1p-126f && absmax >= 0x1p-96f && absmax <= 0x1p96f)) {
    const bool finite = scale < __builtin_inff(), zeros = !(finite && scale >= 0x1p-126f);
    const float factor = zeros ? 0.0f : absmax < 1.0f ? 0x1p64f : 0x1p-64f;
    if (zeros) scale = finite ? 0.0f : __builtin_nanf("");
    for (f32& v : value) v.lane = zeros ? 0.0f : v.lane * factor;
    absmax = zeros ? 1.0f : absmax * factor;
  }
  const typename Codes<kFormat, kSigned>::Encoder encode(absmax);
#pragma unroll
  for (int i = 0; i < n; i++) {
    if constexpr (Codes<kFormat, kSigned>::kIsDynamic) {
      const f32 magnitude = kSigned ? abs(value[i]) : value[i];
      code[i] = encode.code(value[i], magnitude, encode.shift(magnitude));
    } else {
      code[i] = encode(value[i]);
    }
  }
  return scale;
}

}  // namespace lowbit::gpu
