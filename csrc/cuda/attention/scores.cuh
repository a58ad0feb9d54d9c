// SPDX-License-Identifier: Apache-2.0
// Scores of a tile, from the products of queries and keys to the softmax: score_mod, mask_mod, a mask, causality. A
// lane has those of a fragment of mma.sync, whose rows are queries, or keys if keys stay with the CTA. Kernels are
// instantiated with Mods (mods.cuh), which also has:
//   kFolds    scores are hidden, or products times a scale > 0 folded into the exponent: no score_mod or float mask
//   kDropout
//   kBias     dtype of the call's mask
//   kGathers
#pragma once

#include "cuda/attention/mods.cuh"
#include "cuda/attention/tile.cuh"
#include "gpu/attention/place.cuh"

namespace lowbit::cuda {

LOWBIT_INLINE void refuse(const AttentionCall&) { fail(); }

template <DType dtype, class Call>
LOWBIT_INLINE float bias_of(const Call& call, int b, int h, int q, int k) {
  const int64_t at = b * call.bias_stride[0] + h * call.bias_stride[1] +
                     (q - call.position) * call.bias_stride[2] + k * call.bias_stride[3];
  if constexpr (dtype == DType::boolean) return static_cast<const uint8_t*>(call.bias)[at] ? 0.0f : minus_infinity();
  else if constexpr (dtype == DType::float32) return static_cast<const float*>(call.bias)[at];
  else if constexpr (dtype == DType::float64) return static_cast<float>(static_cast<const double*>(call.bias)[at]);
  else if constexpr (dtype == DType::bfloat16) return float_from_bfloat16(static_cast<const uint16_t*>(call.bias)[at]);
  else return float_of_half(static_cast<const uint16_t*>(call.bias)[at]);
}

// The dropout factor of a probability.
LOWBIT_INLINE float dropout_factor(const AttentionCall& call, const TilePosition& at, int q, int k) {
  return dropout_draw(*call.seed, at.b * call.heads + at.h, q, k) < call.dropped ? 0.0f : call.kept;
}

// This lane's first row, relative to its warp; below, its first column within each 8.
LOWBIT_INLINE int first_row() { return lane_of_warp() / 4; }
LOWBIT_INLINE int first_column() { return lane_of_warp() % 4 * 2; }

// Calls each(score, q, k) for the scores of this lane.
template <bool kKeysStay, int kM, int kScores, class Each>
LOWBIT_INLINE void for_each_score(const TilePosition& at, float (&s)[kM][kScores][4], Each each) {
#pragma unroll
  for (int m = 0; m < kM; m++)
#pragma unroll
    for (int n = 0; n < kScores; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row = (warp_of_cta() * kM + m) * 16 + i / 2 * 8 + first_row(),
                  column = n * 8 + i % 2 + first_column();
        each(s[m][n][i], at.q0 + (kKeysStay ? column : row), at.k0 + (kKeysStay ? row : column));
      }
}

// Calls each(mod, m, n, i, q, k, ..) with the mod's values for the query, the key and the diagonal of score s[m][n][i],
// each computed once. In a tile that is cut, mods get only queries and keys that exist.
template <bool kKeysStay, bool kCut, int kM, int kScores, class Mod, class Each>
LOWBIT_INLINE void for_each_with(const Mod& mod, const TilePosition& at, Each each) {
  constexpr int kRows = 2 * kM;
  const int row0 = warp_of_cta() * kM * 16 + first_row(), last_q = at.q0 + at.rows - 1, last_k = at.k0 + at.cols - 1;
  const auto q_of = [&](int r, int column) {
    const int q = at.q0 + (kKeysStay ? column + first_column() : row0 + r * 8);
    return kCut && q > last_q ? last_q : q;
  };
  const auto k_of = [&](int r, int column) {
    const int k = at.k0 + (kKeysStay ? row0 + r * 8 : column + first_column());
    return kCut && k > last_k ? last_k : k;
  };
  std::conditional_t<kKeysStay, typename Mod::Column, typename Mod::Row> of_row[kRows];
  typename Mod::Diagonal diagonals[kScores + kRows - 1][2];
#pragma unroll
  for (int r = 0; r < kRows; r++)
    if constexpr (kKeysStay) of_row[r] = mod.of_column(k_of(r, 0));
    else of_row[r] = mod.of_row(q_of(r, 0));
#pragma unroll
  for (int n = 0; n < kScores; n++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int column = n * 8 + j;
      const auto of_column = [&] {
        if constexpr (kKeysStay) return mod.of_row(q_of(0, column));
        else return mod.of_column(k_of(0, column));
      }();
#pragma unroll
      for (int r = kRows - 1; r >= 0; r--) {
        const int q = q_of(r, column), k = k_of(r, column);
        auto& diagonal = diagonals[n - r + kRows - 1][j];
        if (kCut || r == 0 || n == 0) diagonal = mod.of_diagonal(q, k);
        if constexpr (kKeysStay) each(r / 2, n, r % 2 * 2 + j, q, k, of_column, of_row[r], diagonal);
        else each(r / 2, n, r % 2 * 2 + j, q, k, of_row[r], of_column, diagonal);
      }
    }
}

// Scores of queries and keys that do not exist, or that causality or the window hides, become -inf.
template <bool kKeysStay, class Call, int kM, int kScores>
LOWBIT_INLINE void hide(const Call& call, const TilePosition& at, float (&s)[kM][kScores][4]) {
  const int rows = kKeysStay ? at.cols : at.rows, columns = kKeysStay ? at.rows : at.cols;
  const int diagonal = kKeysStay ? at.k0 - at.q0 : at.q0 - at.k0;  // column of the diagonal in row 0
#pragma unroll
  for (int m = 0; m < kM; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = (warp_of_cta() * kM + m) * 16 + half * 8 + first_row();
      int begin = 0, end = row < rows ? columns : 0;
      if (call.causal && kKeysStay) begin = diagonal + row;
      if (call.causal && !kKeysStay) end = static_cast<int>(smaller(end, diagonal + row + 1));
#pragma unroll
      for (int n = 0; n < kScores; n++)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; i++) {
          const int column = n * 8 + i % 2 + first_column();
          if (column >= end || (kKeysStay && column < begin)) s[m][n][i] = minus_infinity();
        }
    }
  if (!kKeysStay && call.window > 0)
    for_each_score<false>(at, s, [&](float& score, int q, int k) {
      if (k <= q - call.window) score = minus_infinity();
    });
}

// Whether mods read queries and keys of scores, even past the ends.
template <class Mods>
LOWBIT_INLINE constexpr bool asks() { return Mods::kScore || Mods::kMask || Mods::kBias != DType::other; }

template <bool kKeysStay, bool kCut, int kM, int kScores, class Mod>
LOWBIT_INLINE void modify_by(const Mod& mod, const TilePosition& at, float (&s)[kM][kScores][4]) {
  for_each_with<kKeysStay, kCut, kM, kScores>(mod, at, [&](int m, int n, int i, int q, int k, const auto&... values) {
    s[m][n][i] = mod.of_score(s[m][n][i], q, k, values...);
  });
}

// Turns scores (unscaled if Mods folds) into those of the softmax.
template <class Mods, bool kKeysStay, bool kCut, class Call, int kM, int kScores>
LOWBIT_INLINE void modify(const Call& call, const TilePosition& at, float (&s)[kM][kScores][4]) {
  if constexpr (Mods::kScore) modify_by<kKeysStay, kCut>(Mods::score(call, at.b, at.h), at, s);
  if constexpr (Mods::kMask)
    if (at.partial) modify_by<kKeysStay, kCut>(Mods::mask(call, at.b, at.h), at, s);
  const int last_q = at.q0 + at.rows - 1, last_k = at.k0 + at.cols - 1;
  if constexpr (Mods::kBias != DType::other)
    for_each_score<kKeysStay>(at, s, [&](float& score, int q, int k) {
      const int some_q = kCut && q > last_q ? last_q : q, some_k = kCut && k > last_k ? last_k : k;
      score += bias_of<Mods::kBias>(call, at.b, at.h, some_q, some_k);
    });
  if constexpr (kCut) hide<kKeysStay>(call, at, s);
}

// The factor of a difference of scores in the exponent of 2. Applied to differences, since large scores times log2(e)
// could be off by more than 1.
template <class Mods>
LOWBIT_INLINE float exponent_factor(const AttentionCall& call) { return Mods::kFolds ? call.scale * kLog2e : kLog2e; }

}  // namespace lowbit::cuda
