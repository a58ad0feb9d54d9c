// SPDX-License-Identifier: Apache-2.0
// The row of the op int8_linear: int8 times int8 along k, exact in int32 like the product of bitsandbytes. Codes are
// widened to int16 in pairs: those of x once per call, in the order that zip_i8 gives those of w.
#include LOWBIT_ISA_HEADER

#include "cpu/blocks/tiles.hpp"
#include "core/scratch.hpp"
#include "cpu/vector_io.hpp"
#include "ops/blocks.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kChunk = 32;
constexpr int kWeights = 4;

void arrange(const int8_t* x, int64_t k, int16_t* out) {
  for (int64_t i = 0; i < round_up(k, kChunk); i++) {
    const int64_t at = i / kChunk * kChunk + i % 2 * 16 + i % kChunk / 2;
    out[i] = at < k ? x[at] : int16_t{0};
  }
}

template <int kX>
LOWBIT_INLINE void add_chunk(const int8_t* const (&codes)[kWeights], const int16_t* x, int64_t x_stride,
                             i32x16 (&sums)[kWeights][kX]) {
  i16x32 from[kX];
  unroll<kX>([&](auto i) { from[i] = load_i16(x + i * x_stride); });
  unroll<kWeights>([&](auto row) {
    const i16x32 weight = zip_i8(codes[row], codes[row] + 16);
    unroll<kX>([&](auto i) { sums[row][i] = add_pairs(sums[row][i], weight, from[i]); });
  });
}

// Accumulators of kWeights rows of w; missing rows repeat the last one.
template <int kX>
void multiply(const Int8LinearArgs& args, const int16_t* x, int64_t x_stride, int64_t column, int64_t count,
              int32_t* out) {
  const int64_t k = args.x.size(1);
  const int8_t* rows[kWeights];
  for (int row = 0; row < kWeights; row++)
    rows[row] = args.weight.as<const int8_t>() + (column + smaller(row, count - 1)) * k;
  i32x16 sums[kWeights][kX];
  for (auto& row : sums)
    for (i32x16& sum : row) sum = set1(int32_t{0});
  int64_t at = 0;
  for (; at + kChunk <= k; at += kChunk) {
    const int8_t* codes[kWeights];
    for (int row = 0; row < kWeights; row++) {
      codes[row] = rows[row] + at;
      if (at % 64 == 0) __builtin_prefetch(codes[row] + kWeights * k);  // the same chunk of the rows that follow
    }
    add_chunk<kX>(codes, x + at, x_stride, sums);
  }
  if (at < k) {
    int8_t rest[kWeights][kChunk] = {};
    const int8_t* codes[kWeights];
    for (int row = 0; row < kWeights; row++) {
      for (int64_t i = 0; i < k - at; i++) rest[row][i] = rows[row][at + i];
      codes[row] = rest[row];
    }
    add_chunk<kX>(codes, x + at, x_stride, sums);
  }
  for (int row = 0; row < smaller(kWeights, count); row++)
    for (int i = 0; i < kX; i++) out[i * kTaskColumns + row] = sum(sums[row][i]);
}

// Stores y for one row of x and up to 16 rows of w.
LOWBIT_INLINE void finish(const Int8LinearArgs& args, int64_t row, int64_t first, int64_t count, const int32_t* sums) {
  const float* scale = args.column_scale.as<const float>();
  const f32x16 scales = mul(set1(args.row_scale.as<const float>()[row]),
                            load_as_float(scale, DType::float32, first, count));
  f32x16 y = mul(mul(to_float(load_i32(sums)), scales), set1(6.200124e-05f));  // 1 / 127^2 as a float
  if (args.bias) y = add(y, load_as_float(args.bias.data, args.bias.dtype, first, count));
  store_from_float(args.y.data, args.y.dtype, row * args.y.size(1) + first, count, y);
}

void run_int8_linear(const Int8LinearArgs& args) {
  const int64_t m = args.x.size(0), k = args.x.size(1), n = args.weight.size(0), x_stride = round_up(k, kChunk);
  const Scratch memory((m * x_stride + 1) * static_cast<int64_t>(sizeof(int16_t)));
  int16_t* const x = memory.as<int16_t>();
  for (int64_t row = 0; row < m; row++) arrange(args.x.as<const int8_t>() + row * k, k, x + row * x_stride);
  for_each_tile(m, k, n, [&](auto rows, int64_t begin, int64_t first, int64_t count) {
    alignas(64) int32_t sums[kMaxRowsOfX * kTaskColumns] = {};
    for (int64_t column = 0; column < count; column += kWeights)
      multiply<rows>(args, x + begin * x_stride, x_stride, first + column, count - column, sums + column);
    for (int64_t row = 0; row < rows; row++) finish(args, begin + row, first, count, sums + row * kTaskColumns);
  });
}

constexpr Kernel<Int8LinearArgs> kRows[] = {
    {LOWBIT_ROW("int8_linear"), never_refuses<Int8LinearArgs>, run_int8_linear}};

}  // namespace

void blocks_int8_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
