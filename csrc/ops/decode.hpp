// SPDX-License-Identifier: Apache-2.0
// decode: attention of a few queries over a long key-value cache, which is read once, in splits of 256 keys,
// whatever the number of threads. It is not a case of attention, because each would have to refuse half of the
// other's arguments: a cache has codes with scales, a position and a window; attention has dropout, a block mask
// and a backward.
//   s = score_mod(scale * q k^T), -inf where mask_mod, causality, the window or a bool mask say no, + a float mask
//   out = softmax(s) v
// k and v are float, or codes with scales (kv_quantize):
//   int8: one scale per token and head;  int4: one per 32 elements of it.  k = k_scale * code
//   Scales are applied to scores instead of codes:
//   s[t] = scale * k_scale[t] * (q . code[t]);  out = sum over t of (p[t] * v_scale[t]) * code[t]
#pragma once

#include "core/tensor_view.hpp"
#include "ops/kernel.hpp"
#include "ops/kv_format.hpp"

namespace lowbit {

struct ScoreCall;

struct DecodeArgs {
  Place place{};
  TensorView q;                 // [B, Hq, L, E] float32, bfloat16 or float16, last dimension dense, any other strides
  // [B, Hkv, S, E], [B, Hkv, S, Ev] of a float type, or [..., bytes]: int8, or uint8 with two int4 codes each.
  TensorView k, v;
  TensorView k_scale, v_scale;  // [B, Hkv, S, groups] float32 or float16, last dimension dense; for codes only
  TensorView out;               // [B, Hq, L, Ev], dtype of q, last dimension dense
  TensorView lse;               // float32 [B, Hq, L], contiguous, or empty
  TensorView mask;              // bool or floating [B, Hq, L, S] with any strides, or empty
  TensorView sink;              // float32 [Hq], contiguous, or empty: a score without a value
  double scale = 1;
  bool causal = false;          // query i is at `position` + i, and attends to no later key
  int64_t position = 0;
  int64_t window = 0;           // > 0: attends to no key `window` or more positions before it
  bool rotated = false;         // keys are rotated
  const ScoreCall* score_mod = nullptr;
  const ScoreCall* mask_mod = nullptr;

  KvFormat format() const {
    return k.dtype == DType::int8 ? KvFormat::int8 : k.dtype == DType::uint8 ? KvFormat::int4 : KvFormat::floating;
  }
  int64_t batch() const { return q.size(0); }
  int64_t heads() const { return q.size(1); }
  int64_t q_length() const { return q.size(2); }
  int64_t kv_heads() const { return k.size(1); }
  int64_t kv_length() const { return k.size(2); }
  int64_t group() const { return heads() / kv_heads(); }
};

// codes = round(x / scale), x optionally rotated; scale = largest |x| / 127, or for int4 the signed extreme / 8. A nan
// or inf makes the scale nan.
struct KvQuantizeArgs {
  Place place{};
  TensorView x;              // [B, H, L, E] float32, bfloat16 or float16, last dimension dense
  TensorView codes, scale;   // [B, H, L, bytes], [B, H, L, groups], last dimension dense: written
  bool rotate = false;
  KvFormat format() const { return codes.dtype == DType::int8 ? KvFormat::int8 : KvFormat::int4; }
};

struct KvDequantizeArgs {
  Place place{};
  TensorView codes, scale;   // see KvQuantizeArgs
  TensorView x;              // [B, H, L, E]: written
  bool rotated = false;
  KvFormat format() const { return codes.dtype == DType::int8 ? KvFormat::int8 : KvFormat::int4; }
};

// Runs every check and finds the place; out may lack data.
LOWBIT_API void check_args(DecodeArgs& args);
LOWBIT_API void check_args(KvQuantizeArgs& args);
LOWBIT_API void check_args(KvDequantizeArgs& args);
LOWBIT_API Call describe(const DecodeArgs& args);
LOWBIT_API Call describe(const KvQuantizeArgs& args);
LOWBIT_API Call describe(const KvDequantizeArgs& args);

}  // namespace lowbit
