// SPDX-License-Identifier: Apache-2.0
#include "ops/rope_append.hpp"

#include "torch/arguments.hpp"

namespace lowbit::torch {
namespace {

struct RopeAppend : Returns<RopeAppend, &RopeAppendArgs::rotated, &RopeAppendArgs::qkv> {
  static constexpr Text schema =
      "rope_append_(Tensor qkv, Tensor cos, Tensor sin, Tensor(a!) keys, Tensor(b!) values, SymInt start, "
      "Tensor? q_weight=None, Tensor? k_weight=None, float eps=0., float offset=0., "
      "int rotation=0, bool grouped=False, bool norm_behind=False, bool gated=False) -> Tensor";

  static RopeAppendArgs args_of(auto& given) {
    RopeAppendArgs args{.qkv = dense_view<"qkv">(given),
                        .cos = dense_view<"cos">(given),
                        .sin = dense_view<"sin">(given),
                        .q_weight = contiguous_view<"q_weight">(given),
                        .k_weight = contiguous_view<"k_weight">(given),
                        .eps = get<"eps">(given),
                        .offset = get<"offset">(given),
                        .start = get<"start">(given),
                        .keys = written_view<"keys">(given),
                        .values = written_view<"values">(given),
                        .rotated = {},
                        .rotation = get<"rotation">(given),
                        .grouped = get<"grouped">(given),
                        .norm_behind = get<"norm_behind">(given),
                        .gated = get<"gated">(given)};
    check_args(args);
    const int64_t shape[] = {args.batch(), args.heads(), args.tokens(), args.e()};
    args.rotated = contiguous_view(args.qkv.device, args.qkv.dtype, 4, shape);
    return args;
  }
};

}  // namespace

const RegisteredOp rope_append_op = registered<RopeAppend>();

}  // namespace lowbit::torch
