// SPDX-License-Identifier: Apache-2.0
#include "ops/rope_append.hpp"

#include <tuple>

#include "ops/checks.hpp"
#include "ops/place.hpp"
#include "ops/rms_norm.hpp"

namespace lowbit {

using enum ErrorKind;

void check_args(RopeAppendArgs& args) {
  constexpr std::string_view op = "rope_append";
  args.place = place_of(op, {{"qkv", args.qkv}, {"cos", args.cos}, {"sin", args.sin}, {"keys", args.keys},
                             {"values", args.values}, {"q_weight", args.q_weight}, {"k_weight", args.k_weight}});
  const auto& [place, qkv, cos, sin, q_weight, k_weight, eps, offset, start, keys, values, rotated, rotation, grouped, norm_behind, gated] = args;
  check_activation(op, "qkv", qkv);
  check(qkv.rank == 4, value, op, ": qkv must have shape [B, L, Hq + 2 Hkv, E], got ", shape_text(qkv));
  check(keys.rank == 4, value, op, ": keys must have shape [B, Hkv, S, E], got ", shape_text(keys));
  check_dense_rows(op, "qkv", qkv);
  const int64_t batch = args.batch(), length = args.tokens(), e = args.e(), kv_heads = args.kv_heads(),
                room = keys.size(2);
  check(args.heads() >= 0, value, op, ": qkv must have at least two heads for each of the ", kv_heads,
        " of keys, got ", qkv.size(2));
  check(!gated || (!grouped && (qkv.size(2) - 2 * kv_heads) % 2 == 0), value, op,
        ": gated heads must be pairs of a query and its gate, not grouped, got ", qkv.size(2), " heads with ",
        2 * kv_heads, " keys and values");
  check(rotation >= 0 && rotation < kRotations, value, op, ": rotation must be 0 to ", kRotations - 1, ", got ",
        rotation);
  check(!grouped || (kv_heads > 0 && args.heads() % kv_heads == 0), value, op,
        ": grouped heads of queries must be a multiple of the ", kv_heads, " of keys, got ", args.heads());
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
  for (const auto& [name, tensor, heads] :
       {std::tuple<std::string_view, const TensorView&, int64_t>{"q_weight", q_weight, args.heads()},
        {"k_weight", k_weight, kv_heads}}) {
    if (!tensor) continue;
    check_activation(op, name, tensor);
    const bool of_all = tensor.rank == 1 && tensor.size(0) == heads * e && heads != 1;
    if (!of_all) check_shape(op, name, tensor, {e});
    check(!of_all || (!grouped && !gated && !norm_behind && qkv.stride[2] == e), value, op, ": ", name,
          " of all heads must come with heads one behind another, normalized before they are rotated");
    check_contiguous(op, name, tensor);
  }
  check_norm(op, eps, offset);
}

Call describe(const RopeAppendArgs& args) {
  return Call{.read = bytes_of(args.qkv) + bytes_of(args.cos) + bytes_of(args.sin), .written = bytes_of(args.qkv)}
      .with(args.qkv, args.rotated);
}

}  // namespace lowbit
