// SPDX-License-Identifier: Apache-2.0
// Conversion of moments between codes and float32: elements_each() of them per thread, with a block of the format on
// adjacent threads. The same codes and scales as cpu/optim/moment.hpp.
#pragma once

#include "formats/state_codes.hpp"
#include "gpu/device/floats.cuh"
#include "gpu/device/vector.cuh"
#include "gpu/optim/table.hpp"

namespace lowbit::gpu {

template <StateFormat kFormat, bool kSigned>
using Codes = StateCodes<kFormat, kSigned, Table8>;

template <int kBytes> struct WordOf;
template <> struct WordOf<2> { using type = uint16_t; };
template <> struct WordOf<4> { using type = uint32_t; };
template <> struct WordOf<8> { using type = uint2; };
template <> struct WordOf<16> { using type = uint4; };

// Whether an address is aligned for words of any size.
LOWBIT_INLINE bool is_aligned(const void* p) { return (reinterpret_cast<std::size_t>(p) & 15) == 0; }

// `count` elements in memory format. kWhole: all exist, at a word-aligned address. Otherwise `left` exist: loaded one
// by one, the others zero. (With a loop over bytes, Intel's newer compilers keep `to` in memory for both cases.)
template <bool kWhole, class Element, int count>
LOWBIT_INLINE void load_elements(const Element* from, int left, void* to) {
  if constexpr (kWhole) {
    constexpr int kBytes = count * static_cast<int>(sizeof(Element)), kStep = kBytes < 16 ? kBytes : 16;
    using Word = typename WordOf<kStep>::type;
#pragma unroll
    for (int i = 0; i < kBytes / kStep; i++) static_cast<Word*>(to)[i] = reinterpret_cast<const Word*>(from)[i];
  } else {
#pragma unroll
    for (int i = 0; i < count; i++) {
      const Element element = i < left ? from[i] : Element{0};
      std::memcpy(static_cast<uint8_t*>(to) + i * sizeof element, &element, sizeof element);
    }
  }
}
template <bool kWhole, class Element, int count>
LOWBIT_INLINE void store_elements(Element* to, int left, const void* from) {
  if constexpr (kWhole) {
    constexpr int kBytes = count * static_cast<int>(sizeof(Element)), kStep = kBytes < 16 ? kBytes : 16;
    using Word = typename WordOf<kStep>::type;
#pragma unroll
    for (int i = 0; i < kBytes / kStep; i++)  // NVRTC splits the stores of a plain copy into 4-byte words
      __stcs(reinterpret_cast<Word*>(to) + i, static_cast<const Word*>(from)[i]);
  } else {
#pragma unroll
    for (int i = 0; i < count; i++) {
      Element element;
      std::memcpy(&element, static_cast<const uint8_t*>(from) + i * sizeof element, sizeof element);
      if (i < left) to[i] = element;
    }
  }
}

// The elements of a thread: n, in runs of kRun consecutive ones that begin kStride apart, so that the words of a warp
// are contiguous.
template <int kCount, int kRun = kCount, int kStride = kCount>
struct Runs {
  static constexpr int n = kCount;
  using Pairs = Runs<n / 2, kRun / 2, kStride / 2>;  // bytes of two elements each

  LOWBIT_INLINE static constexpr int offset(int i) { return i / kRun * kStride + i % kRun; }  // offset of element i
  static constexpr int kSpan = offset(n - 1) + 1;

  template <bool kWhole, class Element>
  LOWBIT_INLINE static void load(const Element* from, int left, uint32_t* to) {
#pragma unroll
    for (int i = 0; i < n; i += kRun)
      load_elements<kWhole, Element, kRun>(from + offset(i), left - offset(i), reinterpret_cast<Element*>(to) + i);
  }
  template <bool kWhole, class Element>
  LOWBIT_INLINE static void store(Element* to, int left, const uint32_t* from) {
#pragma unroll
    for (int i = 0; i < n; i += kRun)
      store_elements<kWhole, Element, kRun>(to + offset(i), left - offset(i),
                                            reinterpret_cast<const Element*>(from) + i);
  }
};

// Floats of a thread in memory format.
template <class Runs>
struct alignas(16) RawFloats {
  static constexpr int n = Runs::n;
  uint32_t words[n];

  template <bool kWhole>
  LOWBIT_INLINE void load(const void* base, DType dtype, int64_t at, int left) {
    if (dtype == DType::float32) Runs::template load<kWhole>(static_cast<const uint32_t*>(base) + at, left, words);
    else Runs::template load<kWhole>(static_cast<const uint16_t*>(base) + at, left, words);
  }
  template <bool kWhole>
  LOWBIT_INLINE void store(void* base, DType dtype, int64_t at, int left) const {
    if (dtype == DType::float32) Runs::template store<kWhole>(static_cast<uint32_t*>(base) + at, left, words);
    else Runs::template store<kWhole>(static_cast<uint16_t*>(base) + at, left, words);
  }
  LOWBIT_INLINE void read(DType dtype, f32 (&to)[n]) const {
#pragma unroll
    for (int i = 0; i < n; i++) {
      const uint32_t half = words[i / 2] >> 16 * (i % 2) & 0xffff;
      to[i] = {dtype == DType::float32    ? __uint_as_float(words[i])
               : dtype == DType::bfloat16 ? __uint_as_float(half << 16)
                                          : float_of_half(half)};
    }
  }
  LOWBIT_INLINE void write(DType dtype, const f32 (&from)[n]) {
#pragma unroll
    for (int i = 0; i < n; i++) {
      if (dtype == DType::float32) words[i] = __float_as_uint(from[i].lane);
      else if (i % 2 == 0) words[i / 2] = pair_of(dtype, from[i].lane, from[i + 1].lane);
    }
  }
};

// Codes of a thread in memory format; 4-bit codes two per byte, the first in the high nibble.
template <StateFormat kFormat, class Runs>
struct alignas(16) RawCodes {
  using Bytes = std::conditional_t<kFormat == StateFormat::dynamic4, typename Runs::Pairs, Runs>;
  static constexpr int n = Runs::n, kBytes = static_cast<int>(state_bytes(kFormat, n)), kWords = (kBytes + 3) / 4;
  uint32_t words[kWords];

  template <bool kWhole>
  LOWBIT_INLINE void load(const uint8_t* codes, int64_t at, int left) {
    Bytes::template load<kWhole>(codes + state_bytes(kFormat, at), static_cast<int>(state_bytes(kFormat, left)), words);
  }
  template <bool kWhole>
  LOWBIT_INLINE void store(uint8_t* codes, int64_t at, int left) const {
    Bytes::template store<kWhole>(codes + state_bytes(kFormat, at), static_cast<int>(state_bytes(kFormat, left)),
                                  words);
  }
  // As the floats 2^23 + code, for the decoders.
  LOWBIT_INLINE void read(f32 (&number)[n]) const {
#pragma unroll
    for (int i = 0; i < n; i++) {
      const uint32_t bits = kFormat == StateFormat::dynamic4 ? (words[i / 8] >> (i % 8 ^ 1) * 4 & 15) | 0x4b000000u
                                                             : __byte_perm(0x4b000000u, words[i / 4], 0x3004 + i % 4);
      number[i] = {__uint_as_float(bits)};
    }
  }
  LOWBIT_INLINE void write(const i32 (&code)[n], int offset) {
    const auto saturated = [&](int i) {
      const int32_t sum = code[i].lane + offset;
      return static_cast<uint32_t>(sum < 0 ? 0 : sum > 255 ? 255 : sum);
    };
    const auto byte = [&](int i) -> uint32_t {
      if (i >= kBytes) return 0;
      if constexpr (kFormat == StateFormat::dynamic4) return saturated(2 * i) * 16 + saturated(2 * i + 1);
      else return saturated(i);
    };
#pragma unroll
    for (int i = 0; i < kWords; i++)
      words[i] = __byte_perm(__byte_perm(byte(4 * i), byte(4 * i + 1), 0x0040),
                             __byte_perm(byte(4 * i + 2), byte(4 * i + 3), 0x0040), 0x5410);
  }
};

// The scale of the block of element `at`, even for a thread past the last element, which holds a part of the tables.
template <int kBlock>
LOWBIT_INLINE float scale_at(const float* scale, int64_t at, int64_t numel) {
  return at / kBlock * kBlock < numel ? scale[at / kBlock] : 0.0f;
}

constexpr int kStepWarps = kStepThreads / kWarpLanes;

// The largest of kLanes adjacent threads, returned to each. `warps`: not shared with other uses until the next barrier.
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

// The larger bits of |value|: nan above inf. A moment that cannot be negative may still be a negative nan, whose bits
// exceed all others if unsigned.
template <bool kSigned>
LOWBIT_INLINE i32 larger(i32 bits, f32 value) {
  return kSigned ? max(bits, bits_of(abs(value))) : max_u32(bits, bits_of(value));
}

// Codes of this thread's values in multiples of `unit`, and the scale of their block, given the bits of its largest.
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
