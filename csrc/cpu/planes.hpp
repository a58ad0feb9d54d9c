// SPDX-License-Identifier: Apache-2.0
// Codes of 2, 3, 5, 6 and 7 bits, which lie in planes (formats/codec.hpp), to the bytes of int8: code + 128 - zero,
// zero that of a symmetric weight. Nine operations make 64 codes of three bits. Include after a header of cpu/simd/.
#pragma once

#include "cpu/loops.hpp"
#include "formats/format.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kByteTile = kPanelColumns * kTileK;  // bytes of a tile of int8

// The pieces of `kCount` bits of row `kStep` of a tile of int8, in their place in the code.
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

// Whether a weight is unpacked, in whole tiles: it is read as int8 and is of another format.
LOWBIT_INLINE bool is_unpacked(Format format) { return read_as(format) != format; }
LOWBIT_INLINE void unpack_tiles(Format format, const uint8_t* codes, int64_t tiles, uint8_t* out) {
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
