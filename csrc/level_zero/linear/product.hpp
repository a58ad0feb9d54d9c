// SPDX-License-Identifier: Apache-2.0
// linear with dpas: a work-group computes 16 columns. For few rows, 1 or 8, its sub-groups take the tiles along k in
// turn, with the codes of the next one in flight, and their sums are added at the end, in order. For many rows each
// sub-group has its own rows; weights are decoded once for all of them, into shared memory (many_rows.hpp). The same
// bits every time.
#pragma once

#include "level_zero/linear/groups.hpp"
#include "level_zero/linear/weights.hpp"

namespace lowbit::level_zero {

constexpr int kGroupThreads = kWorkers * kLanes;
constexpr int kPieceBytes = 256;  // 8 rows of 32 bytes: 16 k of a part of floats, 32 k of codes

LOWBIT_INLINE u32x8 in_activation_order(u32x8 bytes) {
  return __builtin_shufflevector(bytes, bytes, 0, 4, 1, 5, 2, 6, 3, 7);
}

// Accumulators of a sub-group. kRows: of one product, 1 or 8. kBlocks: number of such blocks of rows.
template <bool kCodes, int kRows, int kBlocks>
struct Product {
  using Part = std::conditional_t<kCodes, int32_t, float>;
  static constexpr int kAllRows = kRows * kBlocks;

  const LinearCall& call;
  const uint8_t *panel, *ordered;  // ordered: of the first block
  int64_t first_row;
  int lane;
  const LevelParts* levels;
  Rows<Part, kRows> sum[kBlocks][kSides];
  Rows<float, kRows> result[kBlocks][kSides];

  LOWBIT_INLINE Product(const LinearCall& call, int64_t panel, int64_t first_row, int lane, const LevelParts* levels)
      : call(call), panel(call.weight + panel * call.sections.row_bytes),
        ordered(static_cast<const uint8_t*>(call.ordered) + first_row / 8 * call.tiles * pieces() * kPieceBytes),
        first_row(first_row), lane(lane), levels(levels) {
    clear();
#pragma unroll
    for (auto& block : result)
#pragma unroll
      for (auto& side : block) side = 0;
  }

  LOWBIT_INLINE void clear() {
#pragma unroll
    for (auto& block : sum)
#pragma unroll
      for (auto& side : block) side = 0;
  }

  LOWBIT_INLINE static int pieces() { return kCodes ? 2 : 4 * x_parts(); }  // per tile of activations
  LOWBIT_INLINE Rows<RowPiece, kRows> rows_of(int tile, int piece, int block) const {
    return load_rows<kRows>(ordered + ((int64_t{block} * call.tiles + tile) * pieces() + piece) * kPieceBytes);
  }

  // factor(side) is 32 k of a column's codes.
  template <class Factor>
  LOWBIT_INLINE void multiply_codes(int tile, int half, Factor&& factor) {
    Rows<RowPiece, kRows> a[kBlocks];
#pragma unroll
    for (int block = 0; block < kBlocks; block++) a[block] = rows_of(tile, half, block);
#pragma unroll
    for (int side = 0; side < kSides; side++) {
      const u32x8 b = factor(side);
#pragma unroll
      for (int block = 0; block < kBlocks; block++) sum[block][side] = mad_i8_u8(a[block], b, sum[block][side]);
    }
  }

  // factor(side, part) is chunk `which` of a half tile, for that many sides.
  template <class Factor>
  LOWBIT_INLINE void multiply_floats(int tile, int half, int which, int first_side, int sides, Factor&& factor) {
    for (int i = 0; i < x_parts(); i++) {
      Rows<RowPiece, kRows> a[kBlocks];
#pragma unroll
      for (int block = 0; block < kBlocks; block++)
        a[block] = rows_of(tile, (half * 2 + which) * x_parts() + i, block);
#pragma unroll
      for (int j = 0; j < gpu::kMaxParts; j++)  // the rest is below 2^-24 of a product
        if (j < weight_parts() && i + j < gpu::kMaxParts)
#pragma unroll
          for (int side = 0; side < kSides; side++) {
            if (side < first_side || side >= first_side + sides) continue;
            const auto b = __builtin_bit_cast(i32x8, factor(side, j));
#pragma unroll
            for (int block = 0; block < kBlocks; block++) sum[block][side] = mad_bf16(a[block], b, sum[block][side]);
          }
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

  // After chunk `which` of a half tile.
  LOWBIT_INLINE void end_chunk(int tile, int half, int which) {
    const int scales = scales_per_tile(), next = half * 2 + which + 1;
    if (scales > 0 && next * scales % 4 == 0) add_scaled(tile * scales + next * scales / 4 - 1);
  }

  LOWBIT_INLINE const uint8_t* tile_at(int tile) const {
    return panel + call.sections.codes + int64_t{tile} * (128 * code_bits());
  }

  LOWBIT_INLINE void use(const Codes& codes, int tile, int half) {
    for (int which = kCodes; which < 2; which++) {
      if constexpr (kCodes) {
        multiply_codes(tile, half, [&](int side) LOWBIT_LAMBDA {
          return in_activation_order(codes.bytes(side, half));
        });
      } else {
        const auto multiply = [&](int first, int sides, const Chunk* chunk) LOWBIT_LAMBDA {
          multiply_floats(tile, half, which, first, sides,
                          [&](int side, int part) LOWBIT_LAMBDA { return chunk[side - first].part[part]; });
        };
        for_chunks(codes, tile_at(tile), half, which, levels, multiply);
      }
      end_chunk(tile, half, which);
    }
  }

  // Whether there are registers for the codes of the next tile.
  LOWBIT_INLINE static bool loads_ahead() { return code_bits() % 4 == 0 && weight_parts() <= 3 - kSides; }
  LOWBIT_INLINE void take_turns(int worker) {
    Codes next;
    if (loads_ahead() && worker < call.tiles) next.load(tile_at(worker), 0);
    for (int tile = worker; tile < call.tiles; tile += kWorkers) {
      Codes now;
      for (int half = 0; half < 2; half++) {
        const bool first = half == 0;
        if (Codes::of_half() || first) {
          if (loads_ahead()) {
            now = next;
            const int ahead = Codes::of_half() && first ? tile : tile + kWorkers;
            if (ahead < call.tiles) next.load(tile_at(ahead), first);
          } else {
            now.load(tile_at(tile), half);
          }
        }
        use(now, tile, half);
      }
    }
  }

  // Writes to shared memory from this row on: floats, or integers for codes with one scale for all k.
  LOWBIT_INLINE void write_sums(uint32_t (*to)[kPanelColumns]) const {
#pragma unroll
    for (int block = 0; block < kBlocks; block++)
#pragma unroll
      for (int side = 0; side < kSides; side++) {
        using Bits = Rows<uint32_t, kRows>;
        const Bits whole = scales_per_tile() ? __builtin_bit_cast(Bits, result[block][side])
                                             : __builtin_bit_cast(Bits, sum[block][side]);
        const int column = lane + side * kLanes;
        if constexpr (kRows == 1) {
          to[block][column] = whole;
        } else {
#pragma unroll
          for (int i = 0; i < kRows; i++) to[block * kRows + i][column] = whole[i];
        }
      }
  }
};

template <bool kCodes>
LOWBIT_INLINE void write_levels(const LinearCall& call, LevelParts (&levels)[16]) {
  if (kCodes || !has_levels()) return;
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread < 16) levels[thread] = level_parts(call.spec.format, thread);
  __syncthreads();
}

// kRows: 8, or 1 for a call with one row.
template <bool kCodes, int kRows>
LOWBIT_INLINE void linear(const LinearCall& call) {
  LOWBIT_SHARED(LevelParts, levels, [16]);
  LOWBIT_SHARED(uint32_t, sums, [kWorkers][kRows][kPanelColumns]);
  write_levels<kCodes>(call, levels);
  const auto group = static_cast<uint32_t>(blockIdx.x), blocks = static_cast<uint32_t>(ceil_div(call.m, kRows));
  const int64_t panel = group / blocks, first_row = int64_t{group % blocks} * kRows;
  const int worker = static_cast<int>(threadIdx.x) / kLanes;
  Product<kCodes, kRows, 1> product(call, panel, first_row, static_cast<int>(threadIdx.x) % kLanes, levels);
  product.take_turns(worker);
  product.write_sums(sums[worker]);
  __syncthreads();
  finish_sums<kCodes>(call, product.panel, panel * kPanelColumns, first_row, sums, levels, kGroupThreads);
}

}  // namespace lowbit::level_zero
