// SPDX-License-Identifier: Apache-2.0
#include "ops/decode.hpp"

#include <array>
#include <cmath>

#include "ops/checks.hpp"
#include "ops/moved.hpp"
#include "ops/place.hpp"
#include "ops/score_program.hpp"

namespace lowbit {

using enum ErrorKind;

namespace {

void check_rank_4(std::string_view op, std::string_view name, const TensorView& tensor, std::string_view shape) {
  check(tensor.rank == 4, value, op, ": ", name, " must have shape ", shape, ", got ", shape_text(tensor));
}

void check_rows(std::string_view op, std::string_view name, const TensorView& tensor,
                std::initializer_list<int64_t> shape) {
  check_shape(op, name, tensor, shape), check_dense_rows(op, name, tensor);
}

struct Codes {
  std::string_view name, scale_name;
  const TensorView &codes, &scale;
};

void check_codes(std::string_view op, const Codes& of, KvFormat format, const std::array<int64_t, 4>& shape) {
  const auto [batch, heads, length, columns] = shape;
  check(columns >= 1 && columns <= kMaxKvColumns, value, op, ": head dimensions of codes must be 1..", kMaxKvColumns,
        ", got ", columns);
  check_rows(op, of.name, of.codes, {batch, heads, length, kv_row_bytes(format, columns)});
  check(of.scale.dtype == DType::float32 || of.scale.dtype == DType::float16, type, op, ": ", of.scale_name,
        " must be float32 or float16, got ", name_of(of.scale.dtype));
  check_rows(op, of.scale_name, of.scale, {batch, heads, length, kv_groups(format, columns)});
}

void check_keys_and_values(std::string_view op, const DecodeArgs& args) {
  const TensorView &k = args.k, &v = args.v;
  const int64_t batch = args.batch(), kv_heads = args.kv_heads(), length = args.kv_length(), e = args.q.size(3),
                ev = args.out.size(3);
  check(k.dtype == v.dtype, type, op, ": value must have the dtype of key, got ", name_of(v.dtype), " and ",
        name_of(k.dtype));
  if (args.format() != KvFormat::floating) {
    check_codes(op, {"key", "k_scale", k, args.k_scale}, args.format(), {batch, kv_heads, length, e});
    check_codes(op, {"value", "v_scale", v, args.v_scale}, args.format(), {batch, kv_heads, length, ev});
    return;
  }
  check(is_activation(k.dtype), type, op, ": key must be float32, bfloat16, float16, int8 or uint8 (int4 codes), got ",
        name_of(k.dtype));
  check_rows(op, "key", k, {batch, kv_heads, length, e});
  check_rows(op, "value", v, {batch, kv_heads, length, ev});
  check(!args.k_scale && !args.v_scale && !args.rotated, value, op,
        ": k_scale, v_scale and rotated must be left out for keys and values of floats");
}

// The call that converts rows of keys or values to codes, or codes to rows.
template <class Args>
void check_cache_conversion(std::string_view op, Args& args) {
  args.place = place_of(op, {{"x", args.x}, {"codes", args.codes}, {"scale", args.scale}});
  const TensorView &x = args.x, &codes = args.codes;
  check_rank_4(op, "x", x, "[B, H, L, E]");
  check_activation(op, "x", x);
  check_dense_rows(op, "x", x);
  check(codes.dtype == DType::int8 || codes.dtype == DType::uint8, type, op,
        ": codes must be int8 or uint8 (two int4 codes a byte), got ", name_of(codes.dtype));
  check_codes(op, {"codes", "scale", codes, args.scale}, args.format(), {x.size(0), x.size(1), x.size(2), x.size(3)});
}

}  // namespace

void check_args(DecodeArgs& args) {
  constexpr std::string_view op = "decode";
  args.place = place_of(op, {{"query", args.q}, {"key", args.k}, {"value", args.v}, {"k_scale", args.k_scale},
                             {"v_scale", args.v_scale}, {"out", args.out}, {"lse", args.lse}, {"mask", args.mask},
                             {"sink", args.sink}});
  check_on(args.place, op, "score_captured", args.score_mod);
  check_on(args.place, op, "mask_captured", args.mask_mod);
  const TensorView &q = args.q, &out = args.out;
  check_rank_4(op, "query", q, "[B, Hq, L, E]"), check_rank_4(op, "key", args.k, "[B, Hkv, S, E]"),
      check_rank_4(op, "value", args.v, "[B, Hkv, S, Ev]"), check_rank_4(op, "out", out, "[B, Hq, L, Ev]");
  check_activation(op, "query", q);
  const int64_t batch = args.batch(), heads = args.heads(), length = args.q_length();
  check_dense_rows(op, "query", q);
  check(q.size(3) >= 1 && out.size(3) >= 1, value, op, ": head dimensions must be at least 1, got E=", q.size(3),
        " Ev=", out.size(3));
  check_groups(op, heads, args.kv_heads());
  check_keys_and_values(op, args);
  check(out.dtype == q.dtype, type, op, ": out must have the dtype of query, got ", name_of(out.dtype), " and ",
        name_of(q.dtype));
  check_rows(op, "out", out, {batch, heads, length, out.size(3)});
  check(std::isfinite(args.scale), value, op, ": scale must be finite, got ", args.scale);
  if (args.lse) check_tensor(op, "lse", args.lse, DType::float32, {batch, heads, length});
  check_mask(op, args.mask, {batch, heads, length, args.kv_length()});
  if (args.sink) check_tensor(op, "sink", args.sink, DType::float32, {heads});
  check(args.window >= 0, value, op, ": window must be positive, or 0 for none, got ", args.window);
}

void check_args(KvQuantizeArgs& args) { check_cache_conversion("kv_quantize", args); }
void check_args(KvDequantizeArgs& args) { check_cache_conversion("kv_dequantize", args); }

// Keys outside the window are not read.
Call describe(const DecodeArgs& args) {
  const int64_t length = args.kv_length(), seen = args.window > 0 ? std::min(length, args.window) : length;
  const int64_t cache = bytes_of(args.k) + bytes_of(args.v) + bytes_of(args.k_scale) + bytes_of(args.v_scale);
  const int64_t rows = args.batch() * args.heads() * args.q_length();
  return Call{.arithmetic = args.format() == KvFormat::floating ? Arithmetic::floating : Arithmetic::integer,
              .read = bytes_of(args.q) + (length ? cache / length * seen : 0) + bytes_of(args.mask),
              .written = bytes_of(args.out) + bytes_of(args.lse),
              .operations = 2 * rows * seen * (args.q.size(3) + args.out.size(3))}
      .with(args.q, args.k, args.out);
}

Call describe(const KvQuantizeArgs& args) { return encoding(args.x, args.codes, args.scale); }
Call describe(const KvDequantizeArgs& args) { return decoding(args.codes, args.scale, args.x); }

}  // namespace lowbit
