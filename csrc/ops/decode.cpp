// SPDX-License-Identifier: Apache-2.0
#include "ops/decode.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "ops/attention.hpp"
#include "ops/moved.hpp"
#include "ops/place.hpp"
#include "ops/score_program.hpp"

namespace lowbit {

using enum ErrorKind;

namespace {

void check_rows(std::string_view op, std::string_view name, const TensorView& tensor,
                std::initializer_list<int64_t> shape) {
  check(tensor.rank == static_cast<int>(shape.size()) && std::equal(shape.begin(), shape.end(), tensor.shape.begin()),
        value, op, ": ", name, " must have shape ", shape_text(shape), ", got ", shape_text(tensor));
  check(tensor.size(-1) <= 1 || tensor.numel() == 0 || tensor.stride[tensor.rank - 1] == 1, value, op, ": ", name,
        " must be dense in its last dimension, got stride ", tensor.stride[tensor.rank - 1]);
}

void check_rank_4(std::string_view op, std::string_view name, const TensorView& tensor, std::string_view shape) {
  check(tensor.rank == 4, value, op, ": ", name, " must have shape ", shape, ", got ", shape_text(tensor));
}

struct Codes {
  std::string_view name, scale_name;
  const TensorView &codes, &scale;
};

void check_codes(std::string_view op, const Codes& of, KvFormat format, const std::array<int64_t, 4>& shape) {
  const auto [batch, heads, length, columns] = shape;
  check(columns >= 1 && columns <= 512, value, op, ": head dimensions of codes must be 1..512, got ",
        columns);  // 512 * 127 * 32767 < 2^31
  check_rows(op, of.name, of.codes, {batch, heads, length, kv_row_bytes(format, columns)});
  check(of.scale.dtype == DType::float32 || of.scale.dtype == DType::float16, type, op, ": ", of.scale_name,
        " must be float32 or float16, got ", name_of(of.scale.dtype));
  check_rows(op, of.scale_name, of.scale, {batch, heads, length, kv_groups(format, columns)});
}

void check_code_type(std::string_view op, std::string_view name, const TensorView& codes) {
  check(codes.dtype == DType::int8 || codes.dtype == DType::uint8, type, op, ": ", name,
        " must be int8 or uint8 (two int4 codes a byte), got ", name_of(codes.dtype));
}

void check_decode(DecodeArgs& args) {
  constexpr std::string_view op = "decode";
  args.place = place_of(op, {{"q", args.q}, {"k", args.k}, {"v", args.v}, {"k_scale", args.k_scale},
                             {"v_scale", args.v_scale}, {"out", args.out}, {"lse", args.lse}, {"mask", args.mask},
                             {"sink", args.sink}});
  check_on(args.place, op, "score_captured", args.score_mod);
  check_on(args.place, op, "mask_captured", args.mask_mod);
  const auto& [place, q, k, v, k_scale, v_scale, out, lse, mask, sink, scale, causal, position, window, rotated,
               score_mod, mask_mod] = args;
  check_rank_4(op, "q", q, "[B, Hq, L, E]"), check_rank_4(op, "k", k, "[B, Hkv, S, E]"),
      check_rank_4(op, "v", v, "[B, Hkv, S, Ev]");
  check_rank_4(op, "out", out, "[B, Hq, L, Ev]");
  check(is_activation(q.dtype), type, op, ": q must be float32, bfloat16 or float16, got ", name_of(q.dtype));
  const int64_t batch = q.size(0), heads = q.size(1), length = q.size(2), e = q.size(3), kv_heads = k.size(1),
                kv_length = k.size(2), ev = out.size(3);
  check_rows(op, "q", q, {batch, heads, length, e});
  check(e >= 1 && ev >= 1, value, op, ": head dimensions must be at least 1, got E=", e, " Ev=", ev);
  check(heads == 0 || (kv_heads >= 1 && heads % kv_heads == 0), value, op,
        ": the heads of q must be a multiple of those of k, got ", heads, " and ", kv_heads);
  check(k.dtype == v.dtype, type, op, ": v must have the dtype of k, got ", name_of(v.dtype), " and ",
        name_of(k.dtype));
  if (args.format() == KvFormat::floating) {
    check(is_activation(k.dtype), type, op, ": k must be float32, bfloat16, float16, int8 or uint8 (int4 codes), got ",
          name_of(k.dtype));
    check_rows(op, "k", k, {batch, kv_heads, kv_length, e});
    check_rows(op, "v", v, {batch, kv_heads, kv_length, ev});
    check(!k_scale && !v_scale && !rotated, value, op, ": float keys and values have no scales and no rotation");
  } else {
    check_codes(op, {"k", "k_scale", k, k_scale}, args.format(), {batch, kv_heads, kv_length, e});
    check_codes(op, {"v", "v_scale", v, v_scale}, args.format(), {batch, kv_heads, kv_length, ev});
  }
  check(out.dtype == q.dtype, type, op, ": out must have the dtype of q, got ", name_of(out.dtype), " and ",
        name_of(q.dtype));
  check_rows(op, "out", out, {batch, heads, length, ev});
  check(std::isfinite(scale), value, op, ": scale must be finite, got ", scale);
  if (lse) {
    check(lse.dtype == DType::float32 && lse.is_contiguous(), type, op, ": lse must be contiguous float32, got ",
          name_of(lse.dtype));
    check_rows(op, "lse", lse, {batch, heads, length});
  }
  if (mask) {
    check(mask.dtype == DType::boolean || mask.dtype == DType::float64 || is_activation(mask.dtype), type, op,
          ": mask must be bool or floating, got ", name_of(mask.dtype));
    check(mask.rank == 4 && mask.size(0) == batch && mask.size(1) == heads && mask.size(2) == length &&
              mask.size(3) == kv_length,
          value, op, ": mask must have shape ", shape_text({batch, heads, length, kv_length}), ", got ",
          shape_text(mask));
  }
  if (sink) {
    check(sink.dtype == DType::float32 && sink.is_contiguous(), type, op, ": sink must be contiguous float32, got ",
          name_of(sink.dtype));
    check_rows(op, "sink", sink, {heads});
  }
  check(window >= 0, value, op, ": window must be positive, or 0 for none, got ", window);
  check(!score_mod || !score_mod->program().is_mask, value, op, ": score_mod must be a program with a float result");
  check(!mask_mod || mask_mod->program().is_mask, value, op, ": mask_mod must be a program with a bool result");
}

// Of rows of keys or values to codes, and back.
template <class Args>
void run_checked(std::string_view op, Args& args) {
  args.place = place_of(op, {{"x", args.x}, {"codes", args.codes}, {"scale", args.scale}});
  const TensorView& x = args.x;
  check_rank_4(op, "x", x, "[B, H, L, E]");
  check(is_activation(x.dtype), type, op, ": x must be float32, bfloat16 or float16, got ", name_of(x.dtype));
  check_rows(op, "x", x, {x.size(0), x.size(1), x.size(2), x.size(3)});
  check_code_type(op, "codes", args.codes);
  check_codes(op, {"codes", "scale", args.codes, args.scale}, args.format(),
              {x.size(0), x.size(1), x.size(2), x.size(3)});
  if (x.numel()) run(args);
}

}  // namespace

void decode(DecodeArgs args) {
  check_decode(args);
  if (args.out.numel() == 0) return;
  run(args);
}

void kv_quantize(KvQuantizeArgs args) { run_checked("kv_quantize", args); }
void kv_dequantize(KvDequantizeArgs args) { run_checked("kv_dequantize", args); }

// Keys that a window hides are not read.
Call describe(const DecodeArgs& args) {
  const int64_t length = args.kv_length(), seen = args.window > 0 ? std::min(length, args.window) : length;
  const int64_t cache = bytes_of(args.k) + bytes_of(args.v) + bytes_of(args.k_scale) + bytes_of(args.v_scale);
  const int64_t rows = args.batch() * args.heads() * args.q_length();
  Call call{.arithmetic = args.format() == KvFormat::floating ? Arithmetic::floating : Arithmetic::integer,
            .read = bytes_of(args.q) + (length ? cache / length * seen : 0) + bytes_of(args.mask),
            .written = bytes_of(args.out) + bytes_of(args.lse),
            .operations = 2 * rows * seen * (args.q.size(3) + args.out.size(3))};
  call.add(args.q), call.add(args.k), call.add(args.out);
  return call;
}

Call describe(const KvQuantizeArgs& args) { return encoding(args.x, args.codes, args.scale); }
Call describe(const KvDequantizeArgs& args) { return decoding(args.codes, args.scale, args.x); }

}  // namespace lowbit
