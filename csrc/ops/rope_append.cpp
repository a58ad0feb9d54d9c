// SPDX-License-Identifier: Apache-2.0
#include "ops/rope_append.hpp"

#include "ops/checks.hpp"
#include "ops/place.hpp"
#include "ops/rms_norm.hpp"

namespace lowbit {

using enum ErrorKind;

void check_args(RopeAppendArgs& args) {
  constexpr std::string_view op = "rope_append";
  args.place = place_of(op, {{"qkv", args.qkv}, {"cos", args.cos}, {"sin", args.sin}, {"keys", args.keys},
                             {"values", args.values}, {"q_weight", args.q_weight}, {"k_weight", args.k_weight}});
  const auto& [place, qkv, cos, sin, q_weight, k_weight, eps, offset, start, keys, values, rotated] = args;
  check_activation(op, "qkv", qkv);
  check(qkv.rank == 4, value, op, ": qkv must have shape [B, L, Hq + 2 Hkv, E], got ", shape_text(qkv));
  check(keys.rank == 4, value, op, ": keys must have shape [B, Hkv, S, E], got ", shape_text(keys));
  check_dense_rows(op, "qkv", qkv);
  const int64_t batch = args.batch(), length = args.tokens(), e = args.e(), kv_heads = args.kv_heads(),
                room = keys.size(2);
  check(args.heads() >= 0, value, op, ": qkv must have at least two heads for each of the ", kv_heads,
        " of keys, got ", qkv.size(2));
  check(start >= 0 && start + length <= room, value, op, ": keys must have room for tokens ", start, " to ",
        start + length, ", got ", room);
  for (const auto& [name, tensor] : {NamedTensor{"keys", keys}, {"values", values}}) {
    check_dtype(op, name, tensor, qkv.dtype);
    check_shape(op, name, tensor, {batch, kv_heads, room, e});
    check_dense_rows(op, name, tensor);
  }
  for (const auto& [name, tensor] : {NamedTensor{"cos", cos}, {"sin", sin}}) {
    check_activation(op, name, tensor);
    check(tensor.rank == 3 && (tensor.size(0) == batch || tensor.size(0) == 1), value, op, ": ", name,
          " must have shape [B or 1, L, R], got ", shape_text(tensor));
    check_shape(op, name, tensor, {tensor.size(0), length, cos.size(2)});
    check_dense_rows(op, name, tensor);
  }
  check(cos.size(2) % 2 == 0 && cos.size(2) <= e, value, op, ": cos must have an even number of columns, at most E=", e,
        ", got ", cos.size(2));
  for (const auto& [name, tensor] : {NamedTensor{"q_weight", q_weight}, {"k_weight", k_weight}}) {
    if (!tensor) continue;
    check_activation(op, name, tensor);
    check_shape(op, name, tensor, {e});
    check_contiguous(op, name, tensor);
  }
  check_norm(op, eps, offset);
}

Call describe(const RopeAppendArgs& args) {
  return Call{.read = bytes_of(args.qkv) + bytes_of(args.cos) + bytes_of(args.sin), .written = bytes_of(args.qkv)}
      .with(args.qkv, args.rotated);
}

}  // namespace lowbit
