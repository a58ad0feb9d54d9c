// SPDX-License-Identifier: Apache-2.0
// Unpacks codes of 2, 3, 5, 6 and 7 bits, stored in planes (formats/codec.hpp), and those of 2:4 weights to the bytes
// of int8: code + 128 - zero, with the zero of a symmetric weight. 64 codes take nine operations with three bits, ten
// for 2:4 weights. Include after a header of cpu/simd/.
#pragma once

#include "cpu/loops.hpp"
#include "formats/format.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kByteTile = kPanelColumns * kTileK;  // bytes of a tile of int8

// The `kCount`-bit pieces for row `kStep` of an int8 tile, shifted to their position in the code.
template <int kBits, int kCount, int kStep>
LOWBIT_INLINE i32x16 pieces(const uint8_t* tile) {
  constexpr CodePosition kAt = piece_of_code(kBits, kCount, 0, 4 * kStep);
  constexpr int kFirst = bits_before_piece(kBits, kCount), kMask = 0x01010101 * ((1 << kCount) - 1) << kFirst;
  const i32x16 row = load_i32(reinterpret_cast<const int32_t*>(tile + kAt.byte));
  if constexpr (kAt.shift >= kFirst) return bit_and(shift_right<kAt.shift - kFirst>(row), set1(int32_t{kMask}));
  else return bit_and(shift_left<kFirst - kAt.shift>(row), set1(int32_t{kMask}));
}

template <int kBits>
[[gnu::noinline]] void unpack(const uint8_t* tile, int64_t tiles, uint8_t* out) {
  constexpr int kCentre = 0x01010101 * (128 - (1 << (kBits - 1)));
  constexpr int64_t kBytes = kByteTile * kBits / 8;
  for (; tiles; tiles--, tile += kBytes, out += kByteTile) {
    for (int64_t at = 0; at < kBytes; at += 64) __builtin_prefetch(tile + 4096 + at);
    unroll<16>([&](auto step) {
      i32x16 codes = set1(int32_t{kCentre});
      unroll<3>([&](auto i) {
        constexpr int kCount = 1 << i;
        if constexpr (kBits & kCount) codes = add(codes, pieces<kBits, kCount, step>(tile));
      });
      store_i32(reinterpret_cast<int32_t*>(out + step * 64), codes);
    });
  }
}

// Moves code `kSlot` of each column to the byte that its position selects; down: 8 * (3 - position) in each byte.
template <int kSlot>
LOWBIT_INLINE i32x16 at_position(i32x16 codes, i32x16 down) {
  const i32x16 top = bit_and(shift_left<24 - 8 * kSlot>(codes), set1(static_cast<int32_t>(0xff000000)));
  return shift_right(top, bit_and(shift_right<8 * kSlot>(down), set1(int32_t{24})));
}

// 2:4 weights (formats/int8_semi_sparse.hpp).
[[gnu::noinline]] void unpack_semi_sparse(const uint8_t* tile, int64_t tiles, uint8_t* out) {
  using Codec = codec_of<Format::int8_semi_sparse>;
  const i32x16 flip = set1(static_cast<int32_t>(0x80808080)), all = set1(int32_t{0x18181818});
  const auto load_row = [](const uint8_t* row) { return load_i32(reinterpret_cast<const int32_t*>(row)); };
  const auto store_row = [&](uint8_t* to, i32x16 a, i32x16 b) {
    store_i32(reinterpret_cast<int32_t*>(to), bit_xor(bit_or(a, b), flip));
  };
  for (; tiles; tiles--, tile += kByteTile * Codec::stored_bits / 8) {
    for (int64_t at = 0; at < kByteTile * Codec::stored_bits / 8; at += 64) __builtin_prefetch(tile + 4096 + at);
    unroll<8>([&](auto step) {
      const i32x16 codes = load_row(tile + Codec::codes_at + step * 64), row = load_row(tile + step % 2 * 64);
      constexpr int kShift = step / 2 * 2;
      i32x16 positions = row;  // positions, times 8
      if constexpr (kShift < 3) positions = shift_left<3 - kShift>(row);
      else positions = shift_right<kShift - 3>(row);
      const i32x16 down = bit_and(bit_xor(positions, all), all);
      store_row(out, at_position<0>(codes, down), at_position<1>(codes, down));
      store_row(out + 64, at_position<2>(codes, down), at_position<3>(codes, down));
      out += 128;
    });
  }
}

// Whether the weight is unpacked, in whole tiles: another format that is read as int8.
LOWBIT_INLINE bool is_unpacked(Format format) { return read_as(format) != format; }
LOWBIT_INLINE void unpack_tiles(Format format, const uint8_t* codes, int64_t tiles, uint8_t* out) {
  if (is_semi_sparse(format)) return unpack_semi_sparse(codes, tiles, out);
  switch (bits(format)) {
    case 2: return unpack<2>(codes, tiles, out);
    case 3: return unpack<3>(codes, tiles, out);
    case 5: return unpack<5>(codes, tiles, out);
    case 6: return unpack<6>(codes, tiles, out);
    case 7: return unpack<7>(codes, tiles, out);
  }
  __builtin_unreachable();
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
