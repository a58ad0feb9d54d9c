// SPDX-License-Identifier: Apache-2.0
// The row of the op block_sparse_linear for all dtypes. Few rows of x: dot products along k, each weight read once.
// Many: y.T = w @ x.T, with 16 rows of x in a vector, so that only x is transposed, and w is not packed.
#include LOWBIT_ISA_HEADER

#include <cstring>

#include "cpu/block_sparse_linear/strips.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

using Args = BlockSparseLinearArgs;

// ---- few rows ------------------------------------------------------------------------------------------------------

template <DType kDType>
LOWBIT_INLINE f32x16 load_values(const void* values, int64_t at) {
  if constexpr (kDType == DType::float32) return load(static_cast<const float*>(values) + at);
  else if constexpr (kDType == DType::bfloat16) return load_bf16(static_cast<const uint16_t*>(values) + at);
  else return load_f16(static_cast<const uint16_t*>(values) + at);
}

// Rows of w at a time: as many accumulators as fit in registers.
template <int kRows>
constexpr int kTogether = kRows * 4 <= kStreamRows || kRows == 1 ? 4 : kRows * 2 <= kStreamRows ? 2 : 1;

// A strip of 16 rows of w times kRows rows of x, float32 [kRows][k].
template <DType kDType, int kRows>
void dot_strip(const Args& args, const float* x, int64_t row, const Strip& strip) {
  constexpr int kCount = kTogether<kRows>;
  const int64_t size = args.size(), k = args.k(), bytes = kDType == DType::float32 ? 4 : 2;
  const char* values = args.values.as<char>();
  alignas(64) float sums[kRows][16 * 16] = {};
  for (int64_t block = strip.begin; block < strip.end; block++) {
    const float* block_x = x + column_of(args, block);
    const int64_t begin = row_of(args, block, strip.first);
    const int64_t next = block + 1 < strip.end ? size * size * bytes : 0;
    for (int64_t first = 0; first < 16; first += kCount) {
      f32x16 sum[kRows][kCount];
      for (int r = 0; r < kRows; r++)
        for (int i = 0; i < kCount; i++) sum[r][i] = load(sums[r] + (first + i) * 16);
      for (int64_t at = 0; at < size; at += 16) {
        f32x16 w[kCount];
        unroll<kCount>([&](auto i) {
          const int64_t from = begin + (first + i) * size + at;
          __builtin_prefetch(values + from * bytes + next);
          w[i] = load_values<kDType>(values, from);
        });
        for (int r = 0; r < kRows; r++) {
          const f32x16 of_x = load(block_x + r * k + at);
          for (int i = 0; i < kCount; i++) sum[r][i] = fma(w[i], of_x, sum[r][i]);
        }
      }
      for (int r = 0; r < kRows; r++)
        for (int i = 0; i < kCount; i++) store(sums[r] + (first + i) * 16, sum[r][i]);
    }
  }
  for (int r = 0; r < kRows; r++) {
    alignas(64) float lanes[16 * 16];
    transpose_16x16(sums[r], 16, lanes, 16);
    f32x16 total = load(lanes);
    for (int i = 1; i < 16; i++) total = add(total, load(lanes + i * 16));
    store_sums(args, row + r, strip.column, total);
  }
}

template <DType kDType>
void run_few(const Args& args) {
  const int64_t m = args.m(), k = args.k();
  const Scratch memory(m * k * static_cast<int64_t>(sizeof(float)));
  float* const x = memory.as<float>();
  for (int64_t i = 0; i < m * k; i += 16) store(x + i, load_values<kDType>(args.x.data, i));
  const Strips strips(args, 16);
  const RowTiles tiles(m, kStreamRows), tasks(strips.count(), larger(1, smaller(4, strips.count() / 64)));
  parallel_for(tasks.count, threads_for_blocks(args), [&](int64_t task) {
    for (int64_t strip = tasks.begin(task); strip < tasks.begin(task + 1); strip++)
      for (int64_t tile = 0; tile < tiles.count; tile++)
        with_count<kStreamRows>(tiles.height(tile), [&](auto kRows) {
          dot_strip<kDType, kRows>(args, x + tiles.begin(tile) * k, tiles.begin(tile), strips.at(strip));
        });
  });
}

// ---- many rows -----------------------------------------------------------------------------------------------------

constexpr int64_t kChunk = 64;   // depth, and rows of a strip: 16 KiB of float32, which stay in L1 for a whole pass
constexpr int64_t kPass = 240;   // rows of x: 60 KiB of accumulators of a strip, 60 KiB of x for a block of 64

// sums[row][x row] += sum over k of w[row][k] * x[k][x row]; rows of w are kChunk apart. Prefetches from `ahead` on as
// many bytes as one vector of x occupies.
template <int kRows, int kVectors>
[[gnu::noinline]] void multiply(const float* w, const float* x, int64_t x_stride, int64_t k, float* sums,
                                int64_t stride, const float* ahead) {
  f32x16 sum[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) sum[r][v] = load(sums + r * stride + v * 16);
  for (int64_t i = 0; i < k; i++, w++, x += 16, ahead += 16) {
    __builtin_prefetch(ahead);
    f32x16 of_x[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) of_x[v] = load(x + v * x_stride);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++) {
      const f32x16 of_w = set1(w[r * kChunk]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) sum[r][v] = fma(of_w, of_x[v], sum[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) store(sums + r * stride + v * 16, sum[r][v]);
}

// Rows first .. first + count of x as [count / 16][k][16], padded with zeros.
void transpose_rows(const Args& args, int64_t first, int64_t count, float* out) {
  const int64_t k = args.k(), vectors = ceil_div(count, 16);
  parallel_for(vectors, threads_worth(8 * count * k), [&](int64_t vector) {
    alignas(64) float rows[16 * 16] = {};
    for (int64_t at = 0; at < k; at += 16) {
      for (int64_t r = 0; r < smaller(16, count - vector * 16); r++)
        store(rows + r * 16, load_as_float(args.x.data, args.x.dtype, (first + vector * 16 + r) * k + at, 16));
      transpose_16x16(rows, 16, out + (vector * k + at) * 16, 16);
    }
  });
}

// `length` values of a strip's rows in a block, from `at` on, as float32 with a row stride of kChunk.
LOWBIT_INLINE const float* widen(const Args& args, int64_t block, const Strip& strip, int64_t at, int64_t length,
                                 float* room) {
  const int64_t begin = row_of(args, block, strip.first) + at;
  if (args.values.dtype == DType::float32 && args.size() == kChunk) return args.values.as<float>() + begin;
  for (int64_t r = 0; r < strip.rows; r++)
    for (int64_t i = 0; i < length; i += 16)
      store(room + r * kChunk + i, load_as_float(args.values.data, args.values.dtype, begin + r * args.size() + i, 16));
  return room;
}

void multiply_strip(const Args& args, const float* x, int64_t first, int64_t count, const Strip& strip) {
  const int64_t size = args.size(), k = args.k(), vectors = ceil_div(count, 16), stride = vectors * 16;
  const int64_t sum_bytes = strip.rows * stride * sizeof(float);
  const Scratch memory(sum_bytes + kChunk * kChunk * static_cast<int64_t>(sizeof(float)));
  float* const sums = memory.as<float>();
  float* room = sums + strip.rows * stride;
  std::memset(sums, 0, sum_bytes);
  const RowTiles tiles(strip.rows, kFloatRows);
  for (int64_t block = strip.begin; block < strip.end; block++)
    for (int64_t at = 0; at < size; at += kChunk) {
      const int64_t length = smaller(kChunk, size - at);
      const float* w = widen(args, block, strip, at, length, room);
      const float* block_x = x + (column_of(args, block) + at) * 16;
      const int64_t next = at + kChunk < size || block + 1 == strip.end ? block : block + 1;
      const float* next_x = x + (column_of(args, next) + (next == block ? smaller(at + kChunk, size - 1) : 0)) * 16;
      for (int64_t v = 0; v < vectors; v += kFloatPanels)
        with_count<kFloatPanels>(static_cast<int>(smaller(kFloatPanels, vectors - v)), [&](auto kVectors) {
          const float* ahead = v + kVectors < vectors ? block_x + (v + kVectors) * k * 16 : next_x;
          for (int64_t tile = 0; tile < tiles.count; tile++)
            with_count<kFloatRows>(tiles.height(tile), [&](auto kRows) {
              const int64_t row = tiles.begin(tile);
              multiply<kRows, kVectors>(w + row * kChunk, block_x + v * k * 16, k * 16, length,
                                        sums + row * stride + v * 16, stride,
                                        ahead + smaller(tile, kVectors - 1) * k * 16);
            });
        });
    }
  for (int64_t v = 0; v < vectors; v++)
    for (int64_t r = 0; r < strip.rows; r += 16)
      store_transposed(args, first + v * 16, count - v * 16, strip.column + r, sums + r * stride + v * 16, stride);
}

void run_many(const Args& args) {
  const Strips strips(args, kChunk);
  const RowTiles passes(args.m(), kPass);
  for (int64_t pass = 0; pass < passes.count; pass++) {
    const int64_t first = passes.begin(pass), count = passes.height(pass);
    const Scratch memory(ceil_div(count, 16) * 16 * args.k() * static_cast<int64_t>(sizeof(float)));
    float* const x = memory.as<float>();
    transpose_rows(args, first, count, x);
    parallel_for(strips.count(), threads_for_blocks(args),
                 [&](int64_t strip) { multiply_strip(args, x, first, count, strips.at(strip)); });
  }
}

void run_block_sparse(const Args& args) {
  if (args.m() > kStreamRows) return run_many(args);
  switch (args.x.dtype) {
    case DType::float32: return run_few<DType::float32>(args);
    case DType::bfloat16: return run_few<DType::bfloat16>(args);
    default: return run_few<DType::float16>(args);
  }
}

constexpr Kernel<Args> kRows[] = {{LOWBIT_ROW("block_sparse_linear"), never_refuses<Args>, run_block_sparse}};

}  // namespace

void block_sparse_linear_floats_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
