// SPDX-License-Identifier: Apache-2.0
// The rows of up to 256 consecutive tokens, of one kv head or of several that lie next to each other: read once, in the
// order of memory, a tile of tokens at a time. While a tile is computed the lines that come behind it are prefetched,
// also past the end of a split: the thread that runs it mostly runs the next one too.
#pragma once

#include "cpu/attention/softmax.hpp"
#include "ops/decode.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// Tokens; a sum over them of int16 probabilities times int8 codes fits int32: 256 * 32767 * 127 < 2^31.
constexpr int64_t kSplit = 256;
constexpr int64_t kRowTile = 4;      // rows of queries that meet a token together; arrays of rows are rounded up to it
// Bytes of a tile: a third of L1, and long enough that starting its loops costs nothing.
constexpr int64_t kTileBytes = 16384;
constexpr int64_t kPrefetch = 8192;  // bytes ahead

// One task: the queries l0..l0 + l_count of the heads of `heads` kv heads from kv_head on, against the keys
// first..first + count. The rows of a kv head are [head of the group][query].
struct SplitPlace {
  int64_t b, kv_head, heads, l0, l_count, first, count;
};

// The queries of a task's first kv head, prepared once per call (PreparedQueries).
struct QueryRows {
  const float* floats;
  const int16_t* codes;
  const float* steps;  // [row][2]: of the rows that meet tokens together, each as often as there are tokens: 8 in all
  int64_t columns, head_rows;  // padded; rows from a kv head to the next
};

// Scratch of one task, for each of its kv heads in turn; rows of a head are rounded up to kRowTile.
struct SplitMemory {
  Matrix<float> scores, out;  // [heads][rows]
  RunningSoftmax<float> softmax;
  float* scales;              // [heads][kSplit][groups] of the codes of the split
  int16_t* weights;           // [heads][groups][rows][kSplit]: probabilities times scales
  float* steps;               // [heads][groups][rows] of these
  float* weighted;            // [kRowTile][kSplit]
  float* gathered;            // [kSplit][groups]: scales that are not next to each other
  void* program;              // of the score programs
  int64_t head_rows;
};

struct TokenRows {
  const char* data;
  int64_t stride, head_stride, bytes, count, heads;  // bytes between tokens and between heads, of a row; tokens; heads
  int64_t tile;                                      // tokens whose rows stay in L1 while all queries meet them

  LOWBIT_INLINE TokenRows(const TensorView& tensor, const SplitPlace& at) : count(at.count), heads(at.heads) {
    const int64_t size = static_cast<int64_t>(size_of(tensor.dtype));
    stride = tensor.stride[2] * size, head_stride = tensor.stride[1] * size, bytes = tensor.size(3) * size;
    data =
        tensor.as<const char>() + (at.b * tensor.stride[0] + at.kv_head * tensor.stride[1]) * size + at.first * stride;
    const int64_t tile_bytes =
        heads > 1 ? 2 * kTileBytes
                  : kTileBytes;  // shared by heads, loops are short: int8, D = 128, token-major 1.1x (AVX2, Zen 5)
    tile = larger(16, smaller(kSplit, tile_bytes / (heads * bytes) / 4 * 4));
  }
  LOWBIT_INLINE const char* row(int64_t head, int64_t t) const { return data + head * head_stride + t * stride; }
};

// The lines to prefetch while a tile is computed: as many as it has, from the token that is kPrefetch bytes further on.
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

// The rows of a head go in fours; two or one are left over. f(integral_constant rows, first row).
template <class F>
LOWBIT_INLINE void for_row_tiles(int64_t rows, F&& f) {
  int64_t r = 0;
  for (; r + 2 < rows; r += kRowTile) f(std::integral_constant<int, kRowTile>{}, r);
  if (r + 2 == rows) f(std::integral_constant<int, 2>{}, r);
  else if (r + 1 == rows) f(std::integral_constant<int, 1>{}, r);
}
constexpr int paired(int rows) {
  return rows == 1 ? 2 : rows;
}  // keys meet two rows in one vector: a single one is there twice
template <class F>
LOWBIT_INLINE void for_paired_row_tiles(int64_t rows, F&& f) {
  int64_t r = 0;
  for (; r + 2 < rows; r += kRowTile) f(std::integral_constant<int, kRowTile>{}, r);
  if (r < rows) f(std::integral_constant<int, 2>{}, r);
}

// f(integral_constant columns) for the usual head dimensions, whose loops are then unrolled, else with 0.
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

// scores[head][r][t] for all rows and tokens. score(integral_constant rows, head, r) returns the function that is
// called for each step of tokens, (same, t, key, stride, to, to_stride): to[row][token] of four rows with the tokens t
// and t + 1, or of two with t..t + 3, whose keys are `stride` bytes apart; with `same` all are token t. Both capture by
// value, so that no store can change their captures. kBytes: of a key, 0 if not known to the compiler.
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
        LinesAhead ahead = lines;  // in registers, as are the next ones
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
          float same[kRowTile * 4];  // [row][4]: the scores of this token, several times
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
