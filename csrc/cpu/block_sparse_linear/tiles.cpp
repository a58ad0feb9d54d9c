// SPDX-License-Identifier: Apache-2.0
// The row of the op block_sparse_linear for bfloat16 on the tile unit: y.T = w @ x.T. Rows of a block are tiles as
// stored; x is transposed once, in pairs, by tiles of 16 rows x 32 k. Accumulators stay in the unit over all blocks of
// a strip.
#include LOWBIT_ISA_HEADER

#include <cstring>

#include "cpu/block_sparse_linear/strips.hpp"
#include "cpu/rows.hpp"
#include "cpu/tiles.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

using Args = BlockSparseLinearArgs;

constexpr int64_t kTileK = 32, kTileBytes = 1024;
constexpr int64_t kPass = 256;  // rows of x
constexpr int kAtOnce = 2;      // tiles of w, and of x, at a time
// A tile of x takes as long with 1 row as with 16: 0.37 ms on AMX, where FMAs take 0.33 with 1 row, 0.53 with 4, 1.27
// with 8 (4096 x 4096, a fifth of the blocks, one thread); on vectors it is twice as fast as FMAs.
constexpr int64_t kMinRows = TileUnit::kSumsInRegisters ? 8 : 3;

// Rows first .. first + count of x as [count / 16][k / 32][16 pairs of k][16 rows], padded with zeros.
void transpose_pairs(const Args& args, int64_t first, int64_t count, char* out) {
  const int64_t k = args.k(), tiles = ceil_div(count, 16);
  parallel_for(tiles, threads_worth(8 * count * k), [&](int64_t tile) {
    const char* x = args.x.as<char>() + (first + tile * 16) * k * 2;
    const int64_t rows = smaller(16, count - tile * 16);
    alignas(64) float block[16 * 16] = {}, turned[16 * 16];
    for (int64_t step = 0; step < k / kTileK; step++) {
      for (int64_t r = 0; r < rows; r++) std::memcpy(block + r * 16, x + (r * k + step * kTileK) * 2, 64);
      transpose_16x16(block, 16, turned, 16);
      std::memcpy(out + (tile * (k / kTileK) + step) * kTileBytes, turned, kTileBytes);
    }
  });
}

// kRowTiles tiles of a strip's rows times kTiles tiles of x, over all of its blocks.
template <int kRowTiles, int kTiles>
void multiply_tiles_of_strip(const Args& args, const char* x, const Strip& strip, int64_t row, int64_t first,
                             int64_t tile, int64_t count) {
  const int64_t size = args.size(), steps = args.k() / kTileK;
  alignas(64) float sums[kRowTiles * kTiles][16 * 16];
  TileUnit::before_loads();
  unroll<kRowTiles * kTiles>([](auto t) { TileUnit::zero<t>(); });
  for (int64_t block = strip.begin; block < strip.end; block++) {
    const char* w = args.values.as<char>() + row_of(args, block, strip.first + row) * 2;
    const char* block_x = x + (tile * steps + column_of(args, block) / kTileK) * kTileBytes;
    multiply_steps<float, 0, kRowTiles, kTiles>(
        size / kTileK, [&](int r) { return TileRows{w + r * 16 * size * 2, size * 2, 64}; },
        [&](int t) { return TileRows{block_x + t * steps * kTileBytes, 64, kTileBytes}; });
  }
  unroll<kRowTiles * kTiles>([&](auto t) { TileUnit::store<t>(sums[t]); });
  unroll<kRowTiles * kTiles>([&](auto t) {
    const int64_t at = (tile + t % kTiles) * 16;
    store_transposed(args, first + at, count - at, strip.column + row + t / kTiles * 16, sums[t], 16);
  });
}

void run_tiles(const Args& args) {
  const Strips strips(args, 64);
  const RowTiles passes(args.m(), kPass);
  for (int64_t pass = 0; pass < passes.count; pass++) {
    const int64_t first = passes.begin(pass), count = passes.height(pass), tiles = ceil_div(count, 16);
    const Scratch memory(tiles * args.k() / kTileK * kTileBytes);
    char* const x = memory.as<char>();
    transpose_pairs(args, first, count, x);
    parallel_for(strips.count(), threads_for_blocks(args), [&](int64_t number) {
      const TileUnit unit(64);
      const Strip strip = strips.at(number);
      for (int64_t row = 0; row < strip.rows; row += 16 * kAtOnce)
        with_count<kAtOnce>(static_cast<int>(smaller(kAtOnce, (strip.rows - row) / 16)), [&](auto kRowTiles) {
          for (int64_t tile = 0; tile < tiles; tile += kAtOnce)
            with_count<kAtOnce>(static_cast<int>(smaller(kAtOnce, tiles - tile)), [&](auto kTiles) {
              multiply_tiles_of_strip<kRowTiles, kTiles>(args, x, strip, row, first, tile, count);
            });
        });
    });
  }
}

std::string_view refuses(const Args& args) {
  if (args.x.dtype != DType::bfloat16) return "not bfloat16";
  if (args.size() % kTileK) return "blocks of no multiple of 32";
  return args.m() < kMinRows ? "few rows: FMAs of float32 are as fast" : "";
}

constexpr Kernel<Args> kRows[] = {{LOWBIT_ROW("block_sparse_linear"), refuses, run_tiles}};

}  // namespace

void block_sparse_linear_tiles_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
