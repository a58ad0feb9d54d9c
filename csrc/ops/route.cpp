// SPDX-License-Identifier: Apache-2.0
#include "ops/route.hpp"

#include <cmath>
#include <utility>

#include "ops/checks.hpp"
#include "ops/place.hpp"

namespace lowbit {

using enum ErrorKind;

namespace {

constexpr std::string_view kRoute = "route";

void check_of_experts(std::string_view name, const TensorView& tensor, int64_t experts) {
  if (!tensor) return;
  check_activation(kRoute, name, tensor);
  check_tensor(kRoute, name, tensor, tensor.dtype, {experts});
}

void check_range(std::string_view name, int64_t number, int64_t most, std::string_view of) {
  check(number >= 1 && number <= most, value, kRoute, ": ", name, " must be 1 to ", most, " (", of, "), got ", number);
}

TensorView logits_of(const Router& router) {
  const auto& [x, weight, bias, rounds] = router;
  check_activation(kRoute, "x", x);
  check(x.rank == 2, value, kRoute, ": x must have shape [T, H], got ", shape_text(x));
  check_contiguous(kRoute, "x", x);
  check_activation(kRoute, "weight", weight);
  check(weight.rank == 2 && weight.size(0) >= 1 && weight.size(1) == x.size(1), value, kRoute,
        ": weight must have shape [E, H], E at least 1 and H=", x.size(1), ", got ", shape_text(weight));
  check_contiguous(kRoute, "weight", weight);
  check_of_experts("bias", bias, weight.size(0));
  TensorView logits{.dtype = DType::float32, .device = x.device, .rank = 2};
  logits.shape[0] = x.size(0), logits.shape[1] = logits.stride[0] = weight.size(0), logits.stride[1] = 1;
  return logits;
}

}  // namespace

RouteArgs route_args(const RouteArgs& given, int64_t scoring) {
  RouteArgs args = given;
  const Router& router = args.router;
  if (router.weight) args.logits = logits_of(router);
  const TensorView& logits = args.logits;
  args.place = place_of(kRoute, {{"logits", router.weight ? router.x : logits}, {"weight", router.weight},
                                 {"bias", router.bias}, {"correction", args.correction},
                                 {"expert_scale", args.expert_scale}});
  check_activation(kRoute, "logits", logits);
  check(logits.rank == 2 && logits.size(1) >= 1, value, kRoute, ": logits must have shape [T, E], E at least 1, got ",
        shape_text(logits));
  check_contiguous(kRoute, "logits", logits);
  const int64_t experts = args.experts();
  check_of_experts("correction", args.correction, experts);
  check_of_experts("expert_scale", args.expert_scale, experts);
  args.scoring = static_cast<Scoring>(check_number(kRoute, "scoring", scoring, std::size(kScoringNames)));
  check_range("k", args.k, experts, "the number of experts");
  check(args.groups >= 1 && experts % args.groups == 0, value, kRoute, ": groups must divide the ", experts,
        " experts, got ", args.groups);
  const int64_t size = experts / args.groups;
  check_range("groups_kept", args.groups_kept, args.groups, "the number of groups");
  check_range("group_top", args.group_top, size, "the experts of a group");
  check(args.zero_outside || args.k <= args.groups_kept * size, value, kRoute, ": k must be at most ",
        args.groups_kept * size, ", the experts of the ", args.groups_kept, " groups that are kept, got ", args.k);
  check(std::isfinite(args.eps) && args.eps >= 0, value, kRoute, ": eps must be finite and not negative, got ",
        args.eps);
  check(std::isfinite(args.least) && args.least >= 0, value, kRoute, ": least must be finite and not negative, got ",
        args.least);
  check(std::isfinite(args.scale), value, kRoute, ": scale must be finite, got ", args.scale);
  return args;
}

Call describe(const RouteArgs& args) {
  const auto& [x, weight, bias, rounds] = args.router;
  const int64_t given = weight ? bytes_of(x) + bytes_of(weight) + bytes_of(bias) : bytes_of(args.logits);
  Call call{.read = given + bytes_of(args.correction) + bytes_of(args.expert_scale),
            .written = bytes_of(args.weights) + bytes_of(args.index)};
  if (weight) call.operations = 2 * weight.numel() * x.size(0);
  return std::move(call).with(weight ? x : args.logits, args.weights, args.index);
}

}  // namespace lowbit
