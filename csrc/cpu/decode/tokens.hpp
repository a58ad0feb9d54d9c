// SPDX-License-Identifier: Apache-2.0
// The rows of up to 256 consecutive tokens, of one kv head or several adjacent ones: read once, in memory order, one
// tile of tokens at a time. While a tile is computed, the lines after it are prefetched, even past the end of a split:
// the next split usually runs on the same thread.
#pragma once

#include "cpu/attention/softmax.hpp"
#include "ops/decode.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// Tokens per split; a sum over them of int16 probabilities times int8 codes fits int32: 256 * 32767 * 127 < 2^31.
constexpr int64_t kSplit = 256;
constexpr int64_t kRowTile = 4;      // rows of queries per register tile; arrays of rows are padded to it
// Bytes of a tile: a third of L1, and long enough to amortize the start of its loops.
constexpr int64_t kTileBytes = 16384;
constexpr int64_t kPrefetch = 8192;  // prefetch distance in bytes

// One task: the queries l0..l0 + l_count of `heads` kv heads from kv_head on, over the keys first..first + count. The
// rows of a kv head are [head of the group][query].
struct SplitRange {
  int64_t b, kv_head, heads, l0, l_count, first, count;
};

// The prepared queries of a task's first kv head (PreparedQueries).
struct QueryRows {
  const float* floats;
  const int16_t* codes;
  const float* steps;  // [row][2]: steps of the rows of a register tile, each repeated for its tokens: 8 in all
  int64_t columns, head_rows;  // padded; rows per kv head
};

// Scratch memory of one task; rows of a head are rounded up to kRowTile.
struct SplitMemory {
  Matrix<float> scores, out;  // [heads][rows]
  RunningSoftmax<float> softmax;
  float* scales;              // [heads][kSplit][groups]: scales of the split's codes
  int16_t* weights;           // [heads][groups][rows][kSplit]: probabilities times scales
  float* steps;               // [heads][groups][rows]: quantization steps of the weights
  float* weighted;            // [kRowTile][kSplit]
  float* gathered;            // [kSplit][groups]: scales that are not adjacent in memory
  void* program;              // memory of the score programs
  int64_t head_rows;
};

struct TokenRows {
  const char* data;
  int64_t stride, head_stride, bytes, count, heads;  // bytes between tokens, between heads, per row; tokens; heads
  int64_t tile;                                      // tokens per tile; their rows stay in L1 for all queries

  LOWBIT_INLINE TokenRows(const TensorView& tensor, const SplitRange& at) : count(at.count), heads(at.heads) {
    const int64_t size = static_cast<int64_t>(size_of(tensor.dtype));
    stride = tensor.stride[2] * size, head_stride = tensor.stride[1] * size, bytes = tensor.size(3) * size;
    data =
        tensor.as<const char>() + (at.b * tensor.stride[0] + at.kv_head * tensor.stride[1]) * size + at.first * stride;
    const int64_t tile_bytes =
        heads > 1 ? 2 * kTileBytes
                  : kTileBytes;  // loops over one head are short: 1.1x for int8, D = 128, token-major (AVX2, Zen 5)
    tile = larger(16, smaller(kSplit, tile_bytes / (heads * bytes) / 4 * 4));
  }
  LOWBIT_INLINE const char* row(int64_t head, int64_t t) const { return data + head * head_stride + t * stride; }
};

// Prefetches while a tile is computed: as many lines as the tile has, starting kPrefetch bytes ahead.
class LinesAhead {
 public:
  LOWBIT_INLINE LinesAhead() = default;  // none
  LOWBIT_INLINE LinesAhead(const TokenRows& rows, int64_t t) : stride_(rows.stride) {
    const int64_t span = (rows.heads - 1) * rows.head_stride + rows.bytes;
    at_ = rows.data + (t + larger(rows.tile, kPrefetch / span)) * rows.stride;
    end_ = span == rows.stride ? kNever : at_ + span;
    gap_ = rows.stride - span;
  }
  LOWBIT_INLINE void fetch(int64_t lines) {
    if (at_ + 64 * lines <= end_) {
      for (int64_t i = 0; i < lines; i++) __builtin_prefetch(at_ + 64 * i);
      at_ += 64 * lines;
    } else if (end_) {
      for (int64_t i = 0; i < lines; i++) step();
    }
  }

 private:
  LOWBIT_INLINE void step() {
    __builtin_prefetch(at_);
    at_ += 64;
    if (at_ >= end_) at_ = end_ + gap_, end_ += stride_;
  }
  static inline const char* const kNever = reinterpret_cast<const char*>(~uintptr_t{0} >> 1);
  const char *at_ = nullptr, *end_ = nullptr;
  int64_t gap_ = 0, stride_ = 0;
};

// Tiles of four rows; then of two or one. f(integral_constant rows, first row).
template <class F>
LOWBIT_INLINE void for_row_tiles(int64_t rows, F&& f) {
  int64_t r = 0;
  for (; r + 2 < rows; r += kRowTile) f(std::integral_constant<int, kRowTile>{}, r);
  if (r + 2 == rows) f(std::integral_constant<int, 2>{}, r);
  else if (r + 1 == rows) f(std::integral_constant<int, 1>{}, r);
}
constexpr int paired(int rows) {
  return rows == 1 ? 2 : rows;
}  // keys are multiplied by two rows per vector: a single one is there twice
template <class F>
LOWBIT_INLINE void for_paired_row_tiles(int64_t rows, F&& f) {
  int64_t r = 0;
  for (; r + 2 < rows; r += kRowTile) f(std::integral_constant<int, kRowTile>{}, r);
  if (r < rows) f(std::integral_constant<int, 2>{}, r);
}

// f(integral_constant columns) for common head dimensions, whose loops are then unrolled, else f of 0.
template <class F>
LOWBIT_INLINE void with_columns(int64_t columns, F&& f) {
  if (kSpecializes && columns == 64) f(std::integral_constant<int, kSpecializes ? 64 : 0>{});
  else if (kSpecializes && columns == 128) f(std::integral_constant<int, kSpecializes ? 128 : 0>{});
  else f(std::integral_constant<int, 0>{});
}

template <int kRows>
LOWBIT_INLINE void store_scores(float* to, int64_t stride, f32x8 scores) {
  if constexpr (kRows == 2) store_two_rows(to, stride, scores);
  else store_four_rows(to, stride, scores);
}

// scores[head][r][t] for all rows and tokens. score(integral_constant rows, head, r) returns a function that is called
// as (same, t, key, stride, to, to_stride) for to[row][token]: four rows by tokens t and t + 1, or two by t..t + 3,
// with keys `stride` bytes apart; with `same` all are token t. Both capture by value, so that no store can alias their
// captures. kBytes: size of a key, 0 if known at run time only.
template <int64_t kBytes, class Score>
LOWBIT_INLINE void score_tokens(const TokenRows& keys, int64_t rows, const SplitMemory& memory, Score&& score) {
  for (int64_t t0 = 0; t0 < keys.count; t0 += keys.tile) {
    LinesAhead lines(keys, t0);
    const int64_t end = smaller(keys.count, t0 + keys.tile);
    for (int64_t h = 0; h < keys.heads; h++)
      for_paired_row_tiles(rows, [&](auto kPaired, int64_t r) {
        constexpr int64_t kTokens = 8 / kPaired;
        const int64_t bytes = kBytes ? kBytes : keys.bytes;
        const bool first_rows = r == 0;
        LinesAhead ahead = lines;  // a copy, in registers, as are the next ones
        const auto score_here = score(kPaired, h, r);
        const int64_t stride = keys.stride, last = end, to_stride = memory.scores.stride;
        float* to = memory.scores.row(h * memory.head_rows + r);
        const char* key = keys.row(h, t0);
        int64_t t = t0;
        for (; t + kTokens <= last; t += kTokens, key += kTokens * stride) {
          if (first_rows) ahead.fetch(ceil_div(kTokens * bytes, 64));
          score_here(false, t, key, stride, to + t, to_stride);
        }
        for (; t < last; t++, key += stride) {
          float same[kRowTile * 4];  // [row][4]: the score of this token, repeated
          score_here(true, t, key, 0, same, 4);
          for (int i = 0; i < kPaired; i++) to[i * to_stride + t] = same[i * 4];
        }
        lines = ahead;
      });
  }
}

// Calls add(integral_constant rows, head, r, t, tokens, lines ahead) for tiles of rows and of tokens.
template <class Add>
LOWBIT_INLINE void visit_values(const TokenRows& values, int64_t rows, Add&& add) {
  for (int64_t t = 0; t < values.count; t += values.tile) {
    LinesAhead ahead(values, t), none;
    for (int64_t h = 0; h < values.heads; h++)
      for_row_tiles(rows, [&](auto kRows, int64_t r) {
        add(kRows, h, r, t, smaller(values.tile, values.count - t), r == 0 ? ahead : none);
      });
  }
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
