// SPDX-License-Identifier: Apache-2.0
// lowbit::decode over codes or floats, and lowbit::kv_quantize_, lowbit::kv_dequantize: what a step of a quantized
// cache is made of.
#include "ops/decode.hpp"

#include "torch/boxed.hpp"
#include "torch/ops.hpp"

namespace lowbit::torch {
namespace {

void decode_kernel(StableIValue* stack) {
  constexpr std::string_view op = "decode";
  Arguments arguments(stack);
  Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor();
  const double scale = arguments.number();
  Tensor k_scale = arguments.optional_tensor(), v_scale = arguments.optional_tensor();
  const bool rotated = arguments.boolean(), causal = arguments.boolean();
  const int64_t position = arguments.integer(), window = arguments.integer(), v_columns = arguments.integer();
  Tensor mask = arguments.optional_tensor(), sink = arguments.optional_tensor();

  DecodeArgs args{.q = q.dense_view(op, "q"),
                  .k = k.dense_view(op, "k"),
                  .v = v.dense_view(op, "v"),
                  .k_scale = k_scale.dense_view(op, "k_scale"),
                  .v_scale = v_scale.dense_view(op, "v_scale"),
                  .out = {},
                  .lse = {},
                  .mask = mask.view(op, "mask"),
                  .sink = sink.contiguous_view(op, "sink"),
                  .scale = scale,
                  .causal = causal,
                  .position = position,
                  .window = window,
                  .rotated = rotated};
  check(args.q.rank == 4 && args.v.rank == 4 && v_columns >= 0, ErrorKind::value, op,
        ": q and v must have 4 dimensions and v_columns be at least 0, got ", shape_text(args.q), ", ",
        shape_text(args.v), " and ", v_columns);
  check(is_activation(args.q.dtype), ErrorKind::type, op, ": q must be float32, bfloat16 or float16, got ",
        name_of(args.q.dtype));
  const int64_t shape[] = {args.q.shape[0], args.q.shape[1], args.q.shape[2], v_columns};
  args.out = contiguous_view(args.q.device, args.q.dtype, 4, shape);
  Tensor out = Tensor::empty(op, args.out);
  decode(args);
  stack[0] = to_value(std::move(out));
}

void kv_quantize_kernel(StableIValue* stack) {
  constexpr std::string_view op = "kv_quantize";
  Arguments arguments(stack);
  Tensor x = arguments.tensor();
  const Tensor codes = arguments.tensor(), scale = arguments.tensor();
  const bool rotate = arguments.boolean();
  kv_quantize({.x = x.dense_view(op, "x"), .codes = codes.written_view(op, "codes"),
               .scale = scale.written_view(op, "scale"), .rotate = rotate});
}

void kv_dequantize_kernel(StableIValue* stack) {
  constexpr std::string_view op = "kv_dequantize";
  Arguments arguments(stack);
  const Tensor codes = arguments.tensor(), scale = arguments.tensor(), x = arguments.tensor();
  const bool rotated = arguments.boolean();
  kv_dequantize({.codes = codes.view(op, "codes"), .scale = scale.view(op, "scale"), .x = x.written_view(op, "x"),
                 .rotated = rotated});
}

}  // namespace

const Op decode_op = {"decode",
                      "decode(Tensor q, Tensor k, Tensor v, float scale, Tensor? k_scale, Tensor? v_scale, bool "
                      "rotated, bool causal, SymInt position, "
                      "int window, SymInt v_columns, Tensor? mask=None, Tensor? sink=None) -> Tensor",
                      boxed<decode_kernel>};

const Op kv_quantize_op = {"kv_quantize_",
                           "kv_quantize_(Tensor x, Tensor(a!) codes, Tensor(b!) scale, bool rotate) -> ()",
                           boxed<kv_quantize_kernel>};

const Op kv_dequantize_op = {"kv_dequantize_",
                             "kv_dequantize_(Tensor codes, Tensor scale, Tensor(a!) x, bool rotated) -> ()",
                             boxed<kv_dequantize_kernel>};

}  // namespace lowbit::torch
