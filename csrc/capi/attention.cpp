// SPDX-License-Identifier: Apache-2.0
// C functions of attention and the ops around it, over float and quantized caches.
#include "ops/attention.hpp"

#include <cmath>

#include "capi/call.hpp"
#include "core/error.hpp"
#include "ops/checks.hpp"
#include "ops/decode.hpp"
#include "ops/rms_norm.hpp"
#include "ops/rope_append.hpp"

namespace lowbit::capi {

using enum ErrorKind;

namespace {

// 1 / sqrt(E) instead of 0.
double scale_of(double given, const TensorView& q) {
  return given != 0 || q.rank == 0 || q.size(-1) == 0 ? given : 1 / std::sqrt(static_cast<double>(q.size(-1)));
}

// The arguments that attention and decode share.
template <class Args, class Options>
Args attention_args(std::string_view op, const lowbit_tensor* query, const lowbit_tensor* key,
                    const lowbit_tensor* value_, const lowbit_tensor* out, const Options& chosen) {
  Args args{};
  args.q = tensor(op, "query", query), args.k = tensor(op, "key", key), args.v = tensor(op, "value", value_);
  args.out = tensor(op, "out", out);
  args.mask = stretched(optional(op, "mask", chosen.mask), args.q, args.k);
  args.sink = optional(op, "sink", chosen.sink);
  args.scale = scale_of(chosen.scale, args.q), args.causal = chosen.causal != 0;
  return args;
}

template <class Args>
void run_conversion(Args args) {
  check_args(args);
  if (args.x.numel() > 0) run(args);
}

}  // namespace

extern "C" {

int lowbit_attention_forward(const lowbit_tensor* query, const lowbit_tensor* key, const lowbit_tensor* value_,
                             const lowbit_tensor* out, const lowbit_attention_options* given) {
  constexpr std::string_view op = "attention_forward";
  return status_of([&] {
    const auto chosen = options(op, given);
    auto args = attention_args<AttentionForwardArgs>(op, query, key, value_, out, chosen);
    args.lse = optional(op, "lse", chosen.lse);
    check_args(args);
    check_dtype(op, "out", args.out, args.q.dtype);
    attention_forward(args);
  });
}

int lowbit_decode(const lowbit_tensor* query, const lowbit_tensor* key, const lowbit_tensor* value_,
                  const lowbit_tensor* out, const lowbit_decode_options* given) {
  constexpr std::string_view op = "decode";
  return status_of([&] {
    const auto chosen = options(op, given);
    auto args = attention_args<DecodeArgs>(op, query, key, value_, out, chosen);
    args.k_scale = optional(op, "k_scale", chosen.k_scale), args.v_scale = optional(op, "v_scale", chosen.v_scale);
    args.window = chosen.window, args.rotated = chosen.rotated != 0;
    check_args(args);
    args.position = args.kv_length() - args.q_length();
    check((!args.causal && args.window == 0) || args.position >= 0, value, op,
          ": queries that causality or a window places must be among the tokens of key, got ",
          args.q_length(), " queries and ", args.kv_length(), " tokens");
    if (args.out.numel() > 0) run(args);
  });
}

int lowbit_kv_sizes(int32_t dtype, int64_t columns, int64_t* row_bytes, int64_t* groups) {
  constexpr std::string_view op = "kv_sizes";
  return status_of([&] {
    check(row_bytes && groups, value, op, ": row_bytes and groups must be given, got NULL");
    check(dtype == LOWBIT_INT8 || dtype == LOWBIT_UINT8, type, op,
          ": dtype must be LOWBIT_INT8 or LOWBIT_UINT8 (two int4 codes a byte), got dtype=", dtype);
    check(columns >= 1 && columns <= kMaxKvColumns, value, op, ": columns must be 1..", kMaxKvColumns, ", got ",
          columns);
    const KvFormat format = dtype == LOWBIT_INT8 ? KvFormat::int8 : KvFormat::int4;
    *row_bytes = kv_row_bytes(format, columns), *groups = kv_groups(format, columns);
  });
}

int lowbit_kv_quantize(const lowbit_tensor* x, const lowbit_tensor* codes, const lowbit_tensor* scale, int32_t rotate) {
  constexpr std::string_view op = "kv_quantize";
  return status_of([&] {
    run_conversion(KvQuantizeArgs{.x = tensor(op, "x", x), .codes = tensor(op, "codes", codes),
                                  .scale = tensor(op, "scale", scale), .rotate = rotate != 0});
  });
}

int lowbit_kv_dequantize(const lowbit_tensor* codes, const lowbit_tensor* scale, const lowbit_tensor* x,
                         int32_t rotated) {
  constexpr std::string_view op = "kv_dequantize";
  return status_of([&] {
    run_conversion(KvDequantizeArgs{.codes = tensor(op, "codes", codes), .scale = tensor(op, "scale", scale),
                                    .x = tensor(op, "x", x), .rotated = rotated != 0});
  });
}

int lowbit_rms_norm(const lowbit_tensor* x, const lowbit_tensor* weight, double eps, const lowbit_tensor* y,
                    const lowbit_rms_norm_options* given) {
  constexpr std::string_view op = "rms_norm";
  return status_of([&] {
    const auto chosen = options(op, given);
    RmsNormArgs args = rms_norm_args(tensor(op, "x", x), tensor(op, "weight", weight), eps, chosen.offset,
                                     optional(op, "add", chosen.add));
    args.y = tensor(op, "y", y);
    check_dtype(op, "y", args.y, args.x.dtype);
    check_shape(op, "y", args.y, shape_text(args.x).sizes);
    check_contiguous(op, "y", args.y);
    if (args.y.numel() > 0) run(args);
  });
}

int lowbit_rope_append(const lowbit_tensor* qkv, const lowbit_tensor* cos, const lowbit_tensor* sin, int64_t start,
                       const lowbit_tensor* keys, const lowbit_tensor* values, const lowbit_tensor* rotated,
                       const lowbit_rope_append_options* given) {
  constexpr std::string_view op = "rope_append";
  return status_of([&] {
    const auto chosen = options(op, given);
    RopeAppendArgs args{.qkv = tensor(op, "qkv", qkv),
                        .cos = tensor(op, "cos", cos),
                        .sin = tensor(op, "sin", sin),
                        .q_weight = optional(op, "q_weight", chosen.q_weight),
                        .k_weight = optional(op, "k_weight", chosen.k_weight),
                        .eps = chosen.eps,
                        .offset = chosen.offset,
                        .start = start,
                        .keys = tensor(op, "keys", keys),
                        .values = tensor(op, "values", values),
                        .rotated = tensor(op, "rotated", rotated)};
    check_args(args);
    check_tensor(op, "rotated", args.rotated, args.qkv.dtype, {args.batch(), args.heads(), args.tokens(), args.e()});
    if (args.qkv.numel() > 0) run(args);
  });
}

}  // extern "C"
}  // namespace lowbit::capi
