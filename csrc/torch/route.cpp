// SPDX-License-Identifier: Apache-2.0
#include "ops/route.hpp"

#include <array>

#include "torch/arguments.hpp"

namespace lowbit::torch {
namespace {

struct Route {
  static constexpr Text schema =
      "route(Tensor logits, int k, int scoring, Tensor? correction=None, int groups=1, int groups_kept=1, "
      "int group_top=1, bool zero_outside=False, bool normalize=False, float eps=0., float least=0., float scale=1., "
      "Tensor? expert_scale=None) -> (Tensor, Tensor)";

  static RouteArgs args_of(auto& given) {
    RouteArgs args = route_args({.logits = contiguous_view<"logits">(given),
                                 .correction = contiguous_view<"correction">(given),
                                 .k = get<"k">(given),
                                 .groups = get<"groups">(given),
                                 .groups_kept = get<"groups_kept">(given),
                                 .group_top = get<"group_top">(given),
                                 .zero_outside = get<"zero_outside">(given),
                                 .normalize = get<"normalize">(given),
                                 .eps = get<"eps">(given),
                                 .least = get<"least">(given),
                                 .scale = get<"scale">(given),
                                 .expert_scale = contiguous_view<"expert_scale">(given)},
                                get<"scoring">(given));
    const int64_t shape[] = {args.tokens(), args.k};
    args.weights = contiguous_view(args.logits.device, DType::float32, 2, shape);
    args.index = contiguous_view(args.logits.device, DType::int64, 2, shape);
    return args;
  }

  static std::array<Tensor, 2> run(Arguments<Route>& given) {
    RouteArgs args = args_of(given);
    std::array<Tensor, 2> results{Tensor::empty(given.op, args.weights), Tensor::empty(given.op, args.index)};
    if (args.tokens() > 0) lowbit::run(args);
    return results;
  }
};

}  // namespace

const RegisteredOp route_op = registered<Route>();

}  // namespace lowbit::torch
