// SPDX-License-Identifier: Apache-2.0
// rope_append: rotary position embedding (Su et al., 2021) of the queries and keys of new tokens, and the writing of
// their keys and values into a cache: the work between a decoder's projections and its attention.
//   q, k, v = heads 0..Hq, Hq..Hq + Hkv, and the last Hkv of qkv
//   k' = k * rsqrt(mean(k^2) + eps) * (offset + k_weight), or k where no weight is given; q' likewise
//   rotated(k)[i]       = k'[i] * cos[i] - k'[i + R/2] * sin[i]              for i in 0..R/2
//   rotated(k)[i + R/2] = k'[i + R/2] * cos[i + R/2] + k'[i] * sin[i + R/2]
//   rotated(k)[i]       = k'[i]                                              for i in R..E
// With rotation `neighbours` the pairs are 2i and 2i + 1 instead of i and i + R/2. With `neighbours_of_halves` they also
// read cos[i] and sin[i] for both; with `neighbours_to_halves` too, and are written to i and i + R/2. With norm_behind, heads are normalized after they are rotated. A weight of all
// heads, [Hq E] or [Hkv E], normalizes them as one row.
// With grouped, the heads of qkv are Hkv groups of Hq / Hkv queries, a key and a value. With gated, a head behind each
// query is the gate of what the query attends to, which this op leaves alone.
//   keys[:, :, start + t] = rotated(k)[:, t];  values[:, :, start + t] = v[:, t];  result = rotated(q)
// Computed in float32 and rounded once.
#pragma once

#include "core/tensor_view.hpp"
#include "ops/kernel.hpp"

namespace lowbit {

enum class Rotation : int64_t { halves = 0, neighbours = 1, neighbours_of_halves = 2, neighbours_to_halves = 3 };
inline constexpr int64_t kRotations = 4;

struct RopeAppendArgs {
  Place place{};
  // [B, L, Hq + 2 Hkv, E], or with gated [B, L, 2 Hq + 2 Hkv, E], as the projections leave it; float32, bfloat16 or
  // float16; last dimension dense
  TensorView qkv;
  TensorView cos, sin;            // [B or 1, L, R], R even and at most E; any of the three dtypes, last dimension dense
  TensorView q_weight, k_weight;  // [E], or [Hq E] and [Hkv E]; any of the three dtypes, contiguous, or empty
  double eps = 0, offset = 0;     // eps and offset of the norms
  int64_t start = 0;
  // [B, Hkv, S, E], S >= start + L, dtype of qkv; last dimension dense, any other strides: written
  TensorView keys, values;
  TensorView rotated;             // [B, Hq, L, E], dtype of qkv, contiguous: written
  int64_t rotation = 0;           // a Rotation
  bool grouped = false, norm_behind = false, gated = false;

  int64_t batch() const { return qkv.size(0); }
  int64_t tokens() const { return qkv.size(1); }
  int64_t kv_heads() const { return keys.size(1); }
  int64_t heads() const { return (qkv.size(2) - 2 * kv_heads()) / (gated ? 2 : 1); }
  int64_t e() const { return qkv.size(3); }
};

// Checks all arguments but `rotated`, and finds the place.
LOWBIT_API void check_args(RopeAppendArgs& args);
LOWBIT_API Call describe(const RopeAppendArgs& args);

}  // namespace lowbit
