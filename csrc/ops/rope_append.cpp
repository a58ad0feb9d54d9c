// SPDX-License-Identifier: Apache-2.0
#include "ops/rope_append.hpp"

#include <algorithm>

#include "ops/place.hpp"
#include "ops/rms_norm.hpp"

namespace lowbit {

using enum ErrorKind;

namespace {

constexpr std::string_view kOp = "rope_append";

void check_shape(std::string_view name, const TensorView& tensor, std::initializer_list<int64_t> shape) {
  check(tensor.rank == static_cast<int>(shape.size()) && std::equal(shape.begin(), shape.end(), tensor.shape.begin()),
        value, kOp, ": ", name, " must have shape ", shape_text(shape), ", got ", shape_text(tensor));
  check(tensor.size(-1) <= 1 || tensor.numel() == 0 || tensor.stride[tensor.rank - 1] == 1, value, kOp, ": ", name,
        " must be dense in its last dimension, got stride ", tensor.stride[tensor.rank - 1]);
}

void check_dtype(std::string_view name, const TensorView& tensor) {
  check(is_activation(tensor.dtype), type, kOp, ": ", name, " must be float32, bfloat16 or float16, got ",
        name_of(tensor.dtype));
}

}  // namespace

RopeAppendArgs checked(RopeAppendArgs args) {
  args.place = place_of(kOp, {{"qkv", args.qkv}, {"cos", args.cos}, {"sin", args.sin}, {"keys", args.keys},
                              {"values", args.values}, {"q_weight", args.q_weight}, {"k_weight", args.k_weight}});
  const auto& [place, qkv, cos, sin, q_weight, k_weight, eps, offset, start, keys, values, rotated] = args;
  check_dtype("qkv", qkv);
  check(qkv.rank == 4, value, kOp, ": qkv must have shape [B, L, Hq + 2 Hkv, E], got ", shape_text(qkv));
  check(keys.rank == 4, value, kOp, ": keys must have shape [B, Hkv, S, E], got ", shape_text(keys));
  const int64_t batch = args.batch(), length = args.tokens(), e = args.e(), kv_heads = args.kv_heads(),
                room = keys.size(2);
  check_shape("qkv", qkv, {batch, length, qkv.size(2), e});
  check(args.heads() >= 0, value, kOp, ": qkv must have at least two heads for each of the ", kv_heads,
        " of keys, got ", qkv.size(2));
  check(start >= 0 && start + length <= room, value, kOp, ": keys must have room for tokens ", start, " to ",
        start + length, ", got ", room);
  for (const auto& [name, tensor] : {NamedTensor{"keys", keys}, {"values", values}}) {
    check(tensor.dtype == qkv.dtype, type, kOp, ": ", name, " must have the dtype of qkv, got ", name_of(tensor.dtype),
          " and ", name_of(qkv.dtype));
    check_shape(name, tensor, {batch, kv_heads, room, e});
  }
  for (const auto& [name, tensor] : {NamedTensor{"cos", cos}, {"sin", sin}}) {
    check_dtype(name, tensor);
    check(tensor.rank == 3 && (tensor.size(0) == batch || tensor.size(0) == 1), value, kOp, ": ", name,
          " must have shape [B or 1, L, R], got ", shape_text(tensor));
    check_shape(name, tensor, {tensor.size(0), length, cos.size(2)});
  }
  check(cos.size(2) % 2 == 0 && cos.size(2) <= e, value, kOp, ": cos must have an even number of columns, at most E=", e,
        ", got ", cos.size(2));
  for (const auto& [name, tensor] : {NamedTensor{"q_weight", q_weight}, {"k_weight", k_weight}}) {
    if (!tensor) continue;
    check_dtype(name, tensor);
    check_shape(name, tensor, {e});
  }
  check_norm(kOp, eps, offset);
  return args;
}

Call describe(const RopeAppendArgs& args) {
  Call call{.read = bytes_of(args.qkv) + bytes_of(args.cos) + bytes_of(args.sin), .written = bytes_of(args.qkv)};
  call.add(args.qkv), call.add(args.rotated);
  return call;
}

}  // namespace lowbit
