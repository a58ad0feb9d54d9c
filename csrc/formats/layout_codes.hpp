// SPDX-License-Identifier: Apache-2.0
// One code or weight of a packed matrix in any layout (layout.hpp). In an unnamed namespace, since kernels of several
// instruction sets include it.
#pragma once

#include <cstring>

#include "formats/layout.hpp"

namespace lowbit {
namespace {

// Code (n, k) with that many bits. The sections are copies, here and below: written bytes could alias them.
template <class From>
LOWBIT_INLINE uint32_t read_code(int bits, Sections from, const uint8_t* in, int64_t n, int64_t k) {
  const uint8_t* codes = in + from.row(n) + from.codes;
  uint32_t code = 0;
  From::pieces(bits, n % from.columns, k, [&](CodePosition at, int first, int count) {
    uint32_t piece = codes[at.byte] >> at.shift;
    if (at.shift + count > 8) piece |= static_cast<uint32_t>(codes[at.byte + 1]) << (8 - at.shift);
    code |= (piece & ((1u << count) - 1)) << first;
  });
  return code;
}

template <Format kFormat, class From>
LOWBIT_INLINE uint32_t read_code(Sections from, const uint8_t* in, int64_t n, int64_t k) {
  if constexpr (is_float(kFormat)) {
    uint32_t code = 0;
    std::memcpy(&code, in + from.row(n) + from.codes + From::template float_at<kFormat>(n % from.columns, k),
                bits(kFormat) / 8);
    return code;
  } else if constexpr (is_semi_sparse(kFormat) && From::leaves_out_zeros) {
    const uint8_t* tile = in + from.row(n) + from.codes + k / kTileK * WeightSpec{kFormat}.tile_bytes();
    return codec_of<kFormat>::read(tile, n % from.columns, k % kTileK);
  } else {
    return read_code<From>(bits(kFormat), from, in, n, k);
  }
}

template <Format kFormat, class To>
LOWBIT_INLINE void write_code(Sections to, uint8_t* out, int64_t n, int64_t k, uint32_t code) {  // over zeros
  uint8_t* codes = out + to.row(n) + to.codes;
  if constexpr (is_float(kFormat)) {
    std::memcpy(codes + To::template float_at<kFormat>(n % to.columns, k), &code, bits(kFormat) / 8);
  } else if constexpr (is_semi_sparse(kFormat) && To::leaves_out_zeros) {
    uint8_t* tile = codes + k / kTileK * WeightSpec{kFormat}.tile_bytes();
    codec_of<kFormat>::write(tile, n % to.columns, k % kTileK, code);
  } else {
    To::pieces(bits(kFormat), n % to.columns, k, [&](CodePosition at, int first, int count) {
      const uint32_t piece = (code >> first & ((1u << count) - 1)) << at.shift;
      codes[at.byte] |= static_cast<uint8_t>(piece);
      if (at.shift + count > 8) codes[at.byte + 1] |= static_cast<uint8_t>(piece >> 8);
    });
  }
}

template <class T>
LOWBIT_INLINE T read_entry(Sections from, const uint8_t* in, int64_t section, int64_t n, int64_t g) {
  T value;
  std::memcpy(&value, in + from.at(section, sizeof(T), n, g), sizeof(T));
  return value;
}

// The scale and zero point of column n and group g: weight = column_scale * group_scale * (level - zero).
struct ScaleAndZero {
  float column_scale, group_scale, zero;
};
LOWBIT_INLINE ScaleAndZero read_scale(int symmetric_zero, const WeightSpec& spec, Sections from, const uint8_t* in,
                                      int64_t n, int64_t g) {
  ScaleAndZero read{read_entry<float>(from, in, from.column_scale, n, 0), 1.0f, static_cast<float>(symmetric_zero)};
  if (spec.group_size) read.group_scale = float_from_float16(read_entry<uint16_t>(from, in, from.group_scale, n, g));
  if (spec.asymmetric) read.zero = float_from_float16(read_entry<uint16_t>(from, in, from.zero, n, g));
  return read;
}

// Weight (n, k).
template <Format kFormat, class From>
LOWBIT_INLINE float read_weight(const WeightSpec& spec, Sections from, const uint8_t* in, int64_t n, int64_t k) {
  using Codec = codec_of<kFormat>;
  const uint32_t code = read_code<kFormat, From>(from, in, n, k);
  if constexpr (is_float(kFormat)) {
    return Codec::decode(static_cast<typename Codec::Code>(code));
  } else {
    const auto of = read_scale(Codec::zero, spec, from, in, n, spec.group_size ? k / spec.group_size : 0);
    return (static_cast<float>(Codec::level(static_cast<int>(code))) - of.zero) * (of.column_scale * of.group_scale);
  }
}

// Weight (n, k) of the integer format with that many bits.
template <class From>
LOWBIT_INLINE float read_integer(int bits, const WeightSpec& spec, Sections from, const uint8_t* in, int64_t n,
                                 int64_t k) {
  const uint32_t code = read_code<From>(bits, from, in, n, k);
  const auto of = read_scale(1 << (bits - 1), spec, from, in, n, spec.group_size ? k / spec.group_size : 0);
  return (static_cast<float>(code) - of.zero) * (of.column_scale * of.group_scale);
}

}  // namespace
}  // namespace lowbit
