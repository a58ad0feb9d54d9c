// SPDX-License-Identifier: Apache-2.0
// linear by dpas: a work-group makes 16 columns of 1, 8 or more rows. Its sub-groups take the tiles along k in turn,
// the codes of the next one on their way, and their sums are added at the end, in order: the same bits every time.
#pragma once

#include "level_zero/linear/groups.hpp"
#include "level_zero/linear/weights.hpp"

namespace lowbit::level_zero {

constexpr int kTeamThreads = kTeams * kLanes;
constexpr int kPieceBytes = 256;  // 8 rows of 32 bytes: 16 k of a part of floats, 32 k of codes

// kRows: of one product, 1 or 8. kBlocks: of so many rows.
template <bool kCodes, int kRows, int kBlocks>
struct Product {
  using Part = std::conditional_t<kCodes, int32_t, float>;
  static constexpr int kAllRows = kRows * kBlocks;

  const LinearCall& call;
  const uint8_t *panel, *ordered;  // of the first block
  int64_t first_row;
  int lane;
  const LevelParts* levels;
  Rows<Part, kRows> sum[kBlocks][kSides];
  Rows<float, kRows> result[kBlocks][kSides];

  LOWBIT_INLINE void clear() {
#pragma unroll
    for (int block = 0; block < kBlocks; block++)
#pragma unroll
      for (int side = 0; side < kSides; side++) sum[block][side] = 0;
  }

  LOWBIT_INLINE static int pieces() { return kCodes ? 2 : 4 * x_parts(); }  // of the activations of a tile
  LOWBIT_INLINE Rows<RowPiece, kRows> rows_of(int tile, int piece, int block) const {
    return load_rows<kRows>(ordered + ((int64_t{block} * call.tiles + tile) * pieces() + piece) * kPieceBytes);
  }

  LOWBIT_INLINE void multiply_codes(const Codes& codes, int tile, int half) {
    u32x8 b[kSides];
#pragma unroll
    for (int side = 0; side < kSides; side++) {
      const u32x8 bytes = codes.bytes(side, half);
      b[side] = __builtin_shufflevector(bytes, bytes, 0, 4, 1, 5, 2, 6, 3, 7);  // as activations are ordered
    }
#pragma unroll
    for (int block = 0; block < kBlocks; block++) {
      const auto a = rows_of(tile, half, block);
#pragma unroll
      for (int side = 0; side < kSides; side++) sum[block][side] = mad_i8_u8(a, b[side], sum[block][side]);
    }
  }

  LOWBIT_INLINE void multiply_floats(const Codes& codes, int tile, int half, int which) {
    Chunk b;
    make_chunk(codes, tile_at(tile), half, which, levels, b);
#pragma unroll
    for (int block = 0; block < kBlocks; block++)
      for (int i = 0; i < x_parts(); i++) {
        const auto a = rows_of(tile, (half * 2 + which) * x_parts() + i, block);
#pragma unroll
        for (int j = 0; j < cuda::kMostParts; j++)  // what is left out is below 2^-24 of a product
          if (j < weight_parts() && i + j < cuda::kMostParts)
#pragma unroll
            for (int side = 0; side < kSides; side++)
              sum[block][side] = mad_bf16(a, __builtin_bit_cast(i32x8, b.part[side][j]), sum[block][side]);
      }
  }

  LOWBIT_INLINE void add_scaled(int part) {
    const int64_t per_row = int64_t{call.tiles} * scales_per_tile();
#pragma unroll
    for (int side = 0; side < kSides; side++) {
      const Scale of(call, panel, part, lane + side * kLanes);
#pragma unroll
      for (int block = 0; block < kBlocks; block++) {
        const RowSum* row = call.sums + (first_row + block * kRows) * per_row + part;
        if constexpr (kRows == 1) {
          result[block][side] = add_part(result[block][side], sum[block][side], row, of);
        } else {
#pragma unroll
          for (int i = 0; i < kRows; i++)
            result[block][side][i] = add_part(result[block][side][i], sum[block][side][i], row + i * per_row, of);
        }
      }
    }
    clear();
  }

  LOWBIT_INLINE void use(const Codes& codes, int tile, int half) {
    const int scales = scales_per_tile();
    for (int which = kCodes; which < 2; which++) {
      if constexpr (kCodes) multiply_codes(codes, tile, half);
      else multiply_floats(codes, tile, half, which);
      const int begin = half * 2 + which + 1;  // of the next chunk
      if (begin * scales % 4 == 0 && scales > 0) add_scaled(tile * scales + begin * scales / 4 - 1);
    }
  }

  LOWBIT_INLINE const uint8_t* tile_at(int tile) const {
    return panel + call.sections.codes + int64_t{tile} * (128 * code_bits());
  }
  LOWBIT_INLINE void run(int team) {
    Codes next;
    if (team < call.tiles) next.load(tile_at(team), 0);
    for (int tile = team; tile < call.tiles; tile += kTeams) {
      Codes now;
      for (int half = 0; half < 2; half++) {
        if (Codes::of_half() || half == 0) {
          now = next;
          const int ahead = Codes::of_half() && half == 0 ? tile : tile + kTeams;
          if (ahead < call.tiles) next.load(tile_at(ahead), 1 - half);
        }
        use(now, tile, half);
      }
    }
  }
};

template <bool kCodes, int kRows, int kBlocks>
LOWBIT_INLINE void linear(const LinearCall& call) {
  using P = Product<kCodes, kRows, kBlocks>;
  LOWBIT_SHARED(LevelParts, levels, [16]);
  LOWBIT_SHARED(uint32_t, sums, [kTeams][P::kAllRows][kPanelColumns]);
  const int64_t blocks = ceil_div(call.m, P::kAllRows), panel = blockIdx.x / blocks,
                first_row = blockIdx.x % blocks * P::kAllRows;
  const int thread = static_cast<int>(threadIdx.x), team = thread / kLanes, lane = thread % kLanes;
  if (!kCodes && has_levels()) {
    if (thread < 16) levels[thread] = level_parts(call.spec.format, thread);
    __syncthreads();
  }
  P product{.call = call, .panel = call.weight + panel * call.sections.row_bytes,
            .ordered = static_cast<const uint8_t*>(call.ordered) + first_row / 8 * call.tiles * P::pieces() * kPieceBytes,
            .first_row = first_row, .lane = lane, .levels = levels};
  product.clear();
#pragma unroll
  for (auto& block : product.result)
#pragma unroll
    for (auto& side : block) side = 0;
  product.run(team);
#pragma unroll
  for (int block = 0; block < kBlocks; block++)
#pragma unroll
    for (int side = 0; side < kSides; side++) {
      using Bits = Rows<uint32_t, kRows>;
      const Bits whole = scales_per_tile() ? __builtin_bit_cast(Bits, product.result[block][side])
                                           : __builtin_bit_cast(Bits, product.sum[block][side]);
      auto* to = &sums[team][block * kRows][lane + side * kLanes];
      if constexpr (kRows == 1) {
        *to = whole;
      } else {
#pragma unroll
        for (int i = 0; i < kRows; i++) to[i * kPanelColumns] = whole[i];
      }
    }
  __syncthreads();
  finish_sums<kCodes>(call, product.panel, panel * kPanelColumns, first_row, sums, levels, kTeamThreads);
}

}  // namespace lowbit::level_zero
