// SPDX-License-Identifier: Apache-2.0
// Rows of the ops blocks_linear and blocks_dequantize: 4-bit weights in the layout of bitsandbytes.
//
// The product runs along k: a chunk, 64 bytes of a row of w, is 16 words of 8 codes. Nibble `at` of word j, counted
// from the lowest, is weight 8 j + (at ^ 1) of the chunk, so x is first put in that order (a float vector per nibble).
// Then a shift, a look-up and an FMA serve 16 weights. The 8 weights of a lane share a scale, whatever blocks the chunk
// spans: it multiplies the partial sum of the chunk. Several rows of w share each load of x, whose chunk is eight times
// as large in bytes.
#include LOWBIT_ISA_HEADER

#include "cpu/blocks/scales.hpp"
#include "cpu/blocks/tiles.hpp"
#include "core/scratch.hpp"
#include "cpu/vector_io.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kChunk = 128, kChunkBytes = kChunk / 2, kNibbles = 8;

LOWBIT_INLINE int log2_of(int64_t power) { return __builtin_ctzll(static_cast<unsigned long long>(power)); }

// One row of x in the order of the chunks, padded with zeros.
void arrange(const TensorView& x, int64_t row, float* out) {
  const int64_t k = x.size(1);
  for (int64_t begin = 0; begin < k; begin += kChunk, out += kChunk)
    for (int64_t i = 0; i < kChunk; i += 16) {
      alignas(64) float values[16];
      const int64_t count = k - begin - i;
      store(values, count > 0 ? load_as_float(x.data, x.dtype, row * k + begin + i, count) : set1(0.0f));
      for (int64_t j = 0; j < 16; j++) out[(j % 8 ^ 1) * 16 + (i + j) / 8] = values[j];
    }
}

// Rows of w that are multiplied together: their codes and scales.
template <int kWeights>
struct Weights {
  const uint8_t* codes[kWeights];
  const float* scales[kWeights];  // the scales from the row's first block on, and 16 more
  int64_t in_block[kWeights];     // offset of the row in its first block
  int block_log;

  // The scales of the words of a chunk that begins at weight `at` of the row.
  LOWBIT_INLINE f32x16 scale(int row, int64_t at) const {
    alignas(64) static constexpr int32_t kBegins[16] = {0,  8,  16, 24, 32, 40, 48,  56,
                                                        64, 72, 80, 88, 96, 104, 112, 120};
    const int64_t from = in_block[row] + at, block = from >> block_log;
    alignas(64) float table[16];
    store(table, load(scales[row] + block));
    const int32_t offset = static_cast<int32_t>(from - (block << block_log));
    return lookup16(table, shift_right(add(load_i32(kBegins), set1(offset)), set1(int32_t{block_log})));
  }
};

template <Format kFormat, int kX, int kWeights>
LOWBIT_INLINE void add_chunk(const Weights<kWeights>& weights, const uint8_t* const* codes, int64_t at, const float* x,
                             int64_t x_stride, f32x16 (&sums)[kWeights][kX]) {
  i32x16 words[kWeights];
  f32x16 partial[kWeights][kX];
  unroll<kWeights>([&](auto row) {
    words[row] = words_of(load_codes(codes[row]));
    unroll<kX>([&](auto i) { partial[row][i] = set1(0.0f); });
  });
  unroll<kNibbles>([&](auto nibble) {
    f32x16 from[kX];
    unroll<kX>([&](auto i) { from[i] = load(x + i * x_stride + 16 * nibble); });
    unroll<kWeights>([&](auto row) {
      const f32x16 level = codec_of<kFormat>::level_of(shift_right<4 * nibble>(words[row]));
      unroll<kX>([&](auto i) { partial[row][i] = fma(level, from[i], partial[row][i]); });
    });
  });
  unroll<kWeights>([&](auto row) {
    const f32x16 scale = weights.scale(row, at);
    unroll<kX>([&](auto i) { sums[row][i] = fma(partial[row][i], scale, sums[row][i]); });
  });
}

template <Format kFormat, int kX, int kWeights>
LOWBIT_INLINE void multiply(const Weights<kWeights>& weights, int64_t k, const float* x, int64_t x_stride, float* out) {
  f32x16 sums[kWeights][kX];
  for (auto& row : sums)
    for (f32x16& sum : row) sum = set1(0.0f);
  int64_t at = 0;
  for (; at + kChunk <= k; at += kChunk) {
    const uint8_t* codes[kWeights];
    for (int row = 0; row < kWeights; row++) {
      codes[row] = weights.codes[row] + at / 2;
      __builtin_prefetch(codes[row] + kWeights * (k / 2));  // the same chunk of the rows that follow
    }
    add_chunk<kFormat, kX, kWeights>(weights, codes, at, x + at, x_stride, sums);
  }
  if (at < k) {
    uint8_t rest[kWeights][kChunkBytes] = {};
    const uint8_t* codes[kWeights];
    for (int row = 0; row < kWeights; row++) {
      for (int64_t i = 0; i < (k - at) / 2; i++) rest[row][i] = weights.codes[row][at / 2 + i];
      codes[row] = rest[row];
    }
    add_chunk<kFormat, kX, kWeights>(weights, codes, at, x + at, x_stride, sums);
  }
  for (int row = 0; row < kWeights; row++)
    for (int i = 0; i < kX; i++) out[i * kTaskColumns + row] = sum(sums[row][i]);
}

// Columns [first, first + count) of y for kX rows of x; `scales` is scratch for kWeights rows of w.
template <Format kFormat, int kX, int kWeights>
void multiply_columns(const BlocksLinearArgs& args, const float* x, int64_t x_stride, int64_t first, int64_t count,
                      float* scales, int64_t scale_stride, float* out) {
  const int64_t k = args.x.size(1);
  const int log = log2_of(args.weight.block_size);
  auto rows = [&]<int kRows>(int64_t column) {
    Weights<kRows> weights;
    weights.block_log = log;
    for (int row = 0; row < kRows; row++) {
      const int64_t begin = (first + column + row) * k, block = begin >> log;
      const int64_t blocks = k > 0 ? ((begin + k - 1) >> log) - block + 1 : 0;
      float* to = scales + row * scale_stride;
      scales_of(args.weight, block, blocks, to);
      for (int64_t i = blocks; i < blocks + 16; i++) to[i] = 0;
      weights.codes[row] = args.weight.codes.as<const uint8_t>() + begin / 2;
      weights.scales[row] = to;
      weights.in_block[row] = begin - (block << log);
    }
    multiply<kFormat, kX, kRows>(weights, k, x, x_stride, out + column);
  };
  int64_t column = 0;
  for (; column + kWeights <= count; column += kWeights) rows.template operator()<kWeights>(column);
  for (; column < count; column++) rows.template operator()<1>(column);
}

template <Format kFormat>
void run_linear(const BlocksLinearArgs& args) {
  const int64_t m = args.x.size(0), k = args.x.size(1), n = args.y.size(1);
  const int64_t x_stride = round_up(k, kChunk), scale_stride = round_up(k / args.weight.block_size + 2 + 16, 16);
  const Scratch memory((m * x_stride + 1) * static_cast<int64_t>(sizeof(float)));
  float* const x = memory.as<float>();
  for (int64_t row = 0; row < m; row++) arrange(args.x, row, x + row * x_stride);
  for_each_tile(m, k, n, [&](auto rows, int64_t begin, int64_t first, int64_t count) {
    const Scratch of_scales(4 * scale_stride * static_cast<int64_t>(sizeof(float)));
    float* const scales = of_scales.as<float>();
    alignas(64) float sums[kMaxRowsOfX * kTaskColumns] = {};
    multiply_columns<kFormat, rows, rows == 1 ? 4 : 2>(args, x + begin * x_stride, x_stride, first, count, scales,
                                                       scale_stride, sums);
    const f32x16 bias =
        args.bias ? load_as_float(args.bias.data, args.bias.dtype, first, count) : set1(0.0f);
    for (int64_t row = 0; row < rows; row++)
      store_from_float(args.y.data, args.y.dtype, (begin + row) * n + first, count,
                       add(load(sums + row * kTaskColumns), bias));
  });
}

template <Format kFormat>
void run_dequantize(const BlocksDequantizeArgs& args) {
  constexpr int64_t kTask = kLargestBlock * 8, kGroup = kSmallestBlock;
  const int log = log2_of(args.weight.block_size);
  const int64_t numel = args.out.numel();
  parallel_for(ceil_div(numel, kTask), threads_worth(8 * numel), [&](int64_t task) {
    const int64_t begin = args.begin + task * kTask, end = smaller(begin + kTask, args.begin + numel);
    float scales[kTask / kSmallestBlock + 1];
    const int64_t block = begin >> log;
    scales_of(args.weight, block, ((end - 1) >> log) - block + 1, scales);
    const uint8_t* codes = args.weight.codes.as<const uint8_t>();
    for (int64_t at = begin; at < end; at += kGroup) {
      const int64_t count = smaller(kGroup, end - at);
      uint8_t rest[kGroup / 2] = {};
      const uint8_t* from = codes + at / 2;
      if (count < kGroup) {
        for (int64_t i = 0; i < ceil_div(count, 2); i++) rest[i] = from[i];
        from = rest;
      }
      f32x16 code[2];
      load_32_u4(from, code[0], code[1]);  // in the lowest bits of each float
      const f32x16 scale = set1(scales[(at >> log) - block]);
      for (int half = 0; half < 2; half++)
        if (count > 16 * half)
          store_from_float(args.out.data, args.out.dtype, at - args.begin + 16 * half, count - 16 * half,
                           mul(codec_of<kFormat>::level_of(bits_of(code[half])), scale));
    }
  });
}

template <Format kFormat, class Args>
std::string_view refuses(const Args& args) {
  return args.weight.format == kFormat ? "" : "another weight format";
}

#define LOWBIT_LINEAR_ROW(format) \
  {LOWBIT_ROW("blocks_linear_" #format), refuses<Format::format, BlocksLinearArgs>, run_linear<Format::format>}
#define LOWBIT_DEQUANTIZE_ROW(format)                                                        \
  {LOWBIT_ROW("blocks_dequantize_" #format), refuses<Format::format, BlocksDequantizeArgs>, \
   run_dequantize<Format::format>}
constexpr Kernel<BlocksLinearArgs> kLinearRows[] = {LOWBIT_LINEAR_ROW(nf4), LOWBIT_LINEAR_ROW(fp4)};
constexpr Kernel<BlocksDequantizeArgs> kDequantizeRows[] = {LOWBIT_DEQUANTIZE_ROW(nf4), LOWBIT_DEQUANTIZE_ROW(fp4)};

}  // namespace

void blocks_blocks_rows(Backend& backend) { add(backend, kLinearRows), add(backend, kDequantizeRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
