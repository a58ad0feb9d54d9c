// SPDX-License-Identifier: Apache-2.0
// Forward: a work-group has a tile of queries of one head and passes over the keys that it may see with a running
// softmax; all in float32. Keys and then values of a tile lie in the same local memory. Of a sub-group's scores a lane
// has every sixteenth key, of its sums every sixteenth column; probabilities go from lane to lane.
#pragma once

#include "level_zero/attention/scores.hpp"

namespace lowbit::level_zero {

template <int kColumns, bool kMods>
struct Forward {
  static constexpr ForwardShape kShape{kColumns};
  static constexpr int kRows = kShape.rows(), kSums = kColumns / kSubGroup;
  static constexpr int kStride = kColumns + 4;  // keys of neighbouring lanes in different banks

  struct Shared {
    alignas(16) float q[kShape.q_tile()][kColumns];
    alignas(16) float keys[kKvTile][kStride];  // or values
  };

  const AttentionCall& call;
  Shared& shared;
  int thread, lane, first;  // first: query of this sub-group in the tile
  float out[kRows][kSums], top[kRows], total[kRows];

  LOWBIT_INLINE void start() {
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      top[r] = cuda::minus_infinity(), total[r] = 0;
#pragma unroll
      for (int c = 0; c < kSums; c++) out[r][c] = 0;
    }
  }

  // `rows` of them, zeros behind and beside.
  template <int kTileRows, int kTo>
  LOWBIT_INLINE void load(float (&to)[kTileRows][kTo], const cuda::HeadRows& tensor, int b, int h, int row, int rows,
                          int columns) const {
    const int64_t begin = b * tensor.batch + h * tensor.head + row * tensor.row;
    for (int at = thread; at < kTileRows * kColumns; at += kAttentionThreads) {
      const int r = at / kColumns, column = at % kColumns;
      to[r][column] = r < rows && column < columns
                          ? load_real(tensor.data, call.dtype, begin + r * tensor.row + column) : 0.0f;
    }
  }

  LOWBIT_INLINE void multiply_keys(float (&s)[kRows][kKeys]) const {
#pragma unroll
    for (int r = 0; r < kRows; r++)
#pragma unroll
      for (int j = 0; j < kKeys; j++) s[r][j] = 0;
    for (int i = 0; i < call.e; i += 4) {
      Vector<float, 4> keys[kKeys];
#pragma unroll
      for (int j = 0; j < kKeys; j++)
        keys[j] = *reinterpret_cast<const Vector<float, 4>*>(&shared.keys[lane + j * kSubGroup][i]);
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        const auto q = *reinterpret_cast<const Vector<float, 4>*>(&shared.q[first + r][i]);
#pragma unroll
        for (int j = 0; j < kKeys; j++)
#pragma unroll
          for (int x = 0; x < 4; x++) s[r][j] = __fmaf_rn(q[x], keys[j][x], s[r][j]);
      }
    }
  }

  LOWBIT_INLINE void modify(const cuda::TilePlace& at, float (&s)[kRows][kKeys]) const {
#pragma unroll
    for (int r = 0; r < kRows; r++)
#pragma unroll
      for (int j = 0; j < kKeys; j++)
        s[r][j] = modified<kMods>(call, at, s[r][j], at.q0 + first + r, at.k0 + lane + j * kSubGroup);
  }

  // Scores to powers of e, sums and the result in relation to the largest score so far.
  LOWBIT_INLINE void softmax(float (&s)[kRows][kKeys]) {
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      float largest = top[r];
#pragma unroll
      for (int j = 0; j < kKeys; j++) largest = fmaxf(largest, s[r][j]);
#pragma unroll
      for (int step = kSubGroup / 2; step; step /= 2) largest = fmaxf(largest, shuffled_xor(largest, step));
      const float base = largest == cuda::minus_infinity() ? 0.0f : largest;
      const float shrink = power_of_2((top[r] - base) * cuda::kLog2e);
      top[r] = largest, total[r] *= shrink;
#pragma unroll
      for (int c = 0; c < kSums; c++) out[r][c] *= shrink;
#pragma unroll
      for (int j = 0; j < kKeys; j++) {
        s[r][j] = power_of_2((s[r][j] - base) * cuda::kLog2e);
        total[r] += s[r][j];
      }
    }
  }

  LOWBIT_INLINE void drop(const cuda::TilePlace& at, float (&s)[kRows][kKeys]) const {
    if (call.dropped == 0) return;
#pragma unroll
    for (int r = 0; r < kRows; r++)
#pragma unroll
      for (int j = 0; j < kKeys; j++)
        s[r][j] *= cuda::dropout_factor(call, at, at.q0 + first + r, at.k0 + lane + j * kSubGroup);
  }

  // Columns in two turns where they are many: their values would not fit the registers.
  LOWBIT_INLINE void multiply_values(const float (&p)[kRows][kKeys]) {
    constexpr int kTurn = kSums < 8 ? kSums : 8;
#pragma unroll
    for (int turn = 0; turn < kSums; turn += kTurn)
#pragma unroll
      for (int j = 0; j < kKeys; j++)
        for (int i = 0; i < kSubGroup; i++) {
          float of_key[kRows];
#pragma unroll
          for (int r = 0; r < kRows; r++) of_key[r] = shuffled(p[r][j], i);
#pragma unroll
          for (int c = turn; c < turn + kTurn; c++) {
            const float value = shared.keys[j * kSubGroup + i][lane + c * kSubGroup];
#pragma unroll
            for (int r = 0; r < kRows; r++) out[r][c] = __fmaf_rn(of_key[r], value, out[r][c]);
          }
        }
  }

  LOWBIT_INLINE void run(int b, int h, const cuda::TileStep& q_step) {
    cuda::TilePlace at;
    for (cuda::TileStep step; step.index < static_cast<int>(call.kv_tiles.count); step.next(call.kv_tiles)) {
      if (!cuda::find_tile(call, b, h, q_step, step, at)) continue;
      at.cut |= at.cols < kKvTile;
      __syncthreads();  // everybody is done with the values before
      load(shared.keys, call.k, b, h / call.group, at.k0, at.cols, call.e);
      __syncthreads();
      float s[kRows][kKeys];
      multiply_keys(s);
      __syncthreads();
      load(shared.keys, call.v, b, h / call.group, at.k0, at.cols, call.ev);
      modify(at, s);
      softmax(s);
      drop(at, s);
      __syncthreads();
      multiply_values(s);
    }
  }

  LOWBIT_INLINE void finish(int b, int h, int q0, int rows) {
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      float sum = total[r];
#pragma unroll
      for (int step = kSubGroup / 2; step; step /= 2) sum += shuffled_xor(sum, step);
      if (first + r < rows) store_row(b, h, q0 + first + r, r, sum);
    }
  }

  LOWBIT_INLINE void store_row(int b, int h, int row, int r, float sum) const {
    const int64_t at = (static_cast<int64_t>(b) * call.heads + h) * call.q_tiles.length + row;
    float base = top[r], scale = 1;
    if (call.max_scores && lane == 0) call.max_scores[at] = sum != sum && base - base == 0 ? sum : base;
    if (call.sink) {
      const float sink = call.sink[h];
      base = sink > base ? sink : base;
      if (base != cuda::minus_infinity()) {
        scale = power_of_2((top[r] - base) * cuda::kLog2e);
        sum = sum * scale + power_of_2((sink - base) * cuda::kLog2e);
      }
    }
    if (call.lse && lane == 0) call.lse[at] = base + logf(sum);
    const float by = sum == 0 ? 0.0f : scale / sum;
    const int64_t begin = b * call.out.batch + h * call.out.head + row * call.out.row;
#pragma unroll
    for (int c = 0; c < kSums; c++)
      if (lane + c * kSubGroup < call.ev)
        store_real(call.out.data, call.out_dtype, begin + lane + c * kSubGroup, out[r][c] * by);
  }
};

// Under causality the last queries have most to do: they are first.
template <int kColumns, bool kMods>
LOWBIT_INLINE void attention_forward(const AttentionCall& call) {
  using F = Forward<kColumns, kMods>;
  LOWBIT_SHARED(typename F::Shared, shared, );
  const int heads = call.batch * call.heads, head = static_cast<int>(blockIdx.x) % heads;
  const int b = head / call.heads, h = head % call.heads;
  const int index = static_cast<int>(call.q_tiles.count) - 1 - static_cast<int>(blockIdx.x) / heads;
  const auto per_block = static_cast<int>(call.q_tiles.per_block);
  const cuda::TileStep q_step{index, index / per_block, index % per_block};
  const int q0 = q_step.begin(call.q_tiles), rows = q_step.size(call.q_tiles);
  const auto thread = static_cast<int>(threadIdx.x);
  F forward{.call = call, .shared = shared, .thread = thread, .lane = thread % kSubGroup,
            .first = thread / kSubGroup * F::kRows};
  forward.load(shared.q, call.q, b, h, q0, rows, call.e);
  forward.start();
  forward.run(b, h, q_step);
  forward.finish(b, h, q0, rows);
}

}  // namespace lowbit::level_zero
