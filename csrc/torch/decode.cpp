// SPDX-License-Identifier: Apache-2.0
// lowbit::decode over codes or floats, and lowbit::kv_quantize_, lowbit::kv_dequantize_: the ops of a decoding step
// with a quantized cache.
#include "ops/decode.hpp"

#include "ops/attention.hpp"
#include "torch/arguments.hpp"

namespace lowbit::torch {
namespace {

// The first `length` rows of keys or values, codes or scales; -1: all.
TensorView first_rows(int64_t length, TensorView rows) {
  if (length < 0 || rows.rank != 4) return rows;
  check(length <= rows.shape[2], ErrorKind::value, "decode: length must be at most the number of keys, ",
        rows.shape[2], ", got ", length);
  rows.shape[2] = length;
  return rows;
}

// As many rows of a cache as x has, from `first` on; -1: all.
TensorView rows_from(int64_t first, TensorView rows, const TensorView& x) {
  if (first < 0 || rows.rank != 4 || x.rank != 4) return rows;
  check(first <= rows.shape[2] - x.shape[2], ErrorKind::value, "kv_quantize: first must leave room for ", x.shape[2],
        " rows of ", rows.shape[2], ", got ", first);
  rows.data = static_cast<char*>(rows.data) + first * rows.stride[2] * static_cast<int64_t>(size_of(rows.dtype));
  rows.shape[2] = x.shape[2];
  return rows;
}

struct Decode : Returns<Decode, &DecodeArgs::out> {
  static constexpr Text schema =
      "decode(Tensor q, Tensor k, Tensor v, float scale, Tensor? k_scale, Tensor? v_scale, bool rotated, bool causal, "
      "SymInt position, int window, SymInt v_columns, Tensor? mask=None, Tensor? sink=None, SymInt length=-1) "
      "-> Tensor";

  static DecodeArgs args_of(auto& given) {
    const int64_t length = get<"length">(given);
    DecodeArgs args{.q = dense_view<"q">(given),
                    .k = first_rows(length, dense_view<"k">(given)),
                    .v = first_rows(length, dense_view<"v">(given)),
                    .k_scale = first_rows(length, dense_view<"k_scale">(given)),
                    .v_scale = first_rows(length, dense_view<"v_scale">(given)),
                    .out = {},
                    .lse = {},
                    .mask = {},
                    .sink = contiguous_view<"sink">(given),
                    .scale = get<"scale">(given),
                    .causal = get<"causal">(given),
                    .position = get<"position">(given),
                    .window = get<"window">(given),
                    .rotated = get<"rotated">(given)};
    args.mask = stretched(view<"mask">(given), args.q, args.k);
    const int64_t shape[] = {args.q.shape[0], args.q.shape[1], args.q.shape[2], get<"v_columns">(given)};
    args.out = contiguous_view(args.q.device, args.q.dtype, 4, shape);
    check_args(args);
    return args;
  }
};

template <class Args>
Args checked(Args args) {
  check_args(args);
  return args;
}

template <class Args>
void run_rows(const Args& args) {
  if (args.x.numel() > 0) lowbit::run(args);
}

struct KvQuantize {
  static constexpr Text schema =
      "kv_quantize_(Tensor x, Tensor(a!) codes, Tensor(b!) scale, bool rotate, SymInt first=-1) -> ()";

  static KvQuantizeArgs args_of(auto& given) {
    const TensorView x = dense_view<"x">(given);
    const int64_t first = get<"first">(given);
    return checked(KvQuantizeArgs{.x = x,
                                  .codes = rows_from(first, written_view<"codes">(given), x),
                                  .scale = rows_from(first, written_view<"scale">(given), x),
                                  .rotate = get<"rotate">(given)});
  }

  static void run(Arguments<KvQuantize>& given) { run_rows(args_of(given)); }
};

struct KvDequantize {
  static constexpr Text schema = "kv_dequantize_(Tensor codes, Tensor scale, Tensor(a!) x, bool rotated) -> ()";

  static KvDequantizeArgs args_of(auto& given) {
    return checked(KvDequantizeArgs{.codes = view<"codes">(given), .scale = view<"scale">(given),
                                    .x = written_view<"x">(given), .rotated = get<"rotated">(given)});
  }

  static void run(Arguments<KvDequantize>& given) { run_rows(args_of(given)); }
};

}  // namespace

const RegisteredOp decode_op = registered<Decode>();
const RegisteredOp kv_quantize_op = registered<KvQuantize>();
const RegisteredOp kv_dequantize_op = registered<KvDequantize>();

}  // namespace lowbit::torch
