// SPDX-License-Identifier: Apache-2.0
#include "ops/sample.hpp"

#include "torch/arguments.hpp"

namespace lowbit::torch {
namespace {

struct Sample : Returns<Sample, &SampleArgs::y> {
  static constexpr Text schema =
      "sample(Tensor logits, Tensor? ids=None, float temperature=1., int top_k=0, float top_p=1., float min_p=0., "
      "float repetition_penalty=1., int seed=0, SymInt position=0) -> Tensor";

  static SampleArgs args_of(auto& given) {
    SampleArgs args = sample_args({.logits = contiguous_view<"logits">(given),
                                   .ids = contiguous_view<"ids">(given),
                                   .temperature = get<"temperature">(given),
                                   .top_k = get<"top_k">(given),
                                   .top_p = get<"top_p">(given),
                                   .min_p = get<"min_p">(given),
                                   .repetition_penalty = get<"repetition_penalty">(given),
                                   .seed = get<"seed">(given),
                                   .position = get<"position">(given)});
    const int64_t shape[] = {args.logits.size(0)};
    args.y = contiguous_view(args.logits.device, DType::int64, 1, shape);
    return args;
  }
};

}  // namespace

const RegisteredOp sample_op = registered<Sample>();

}  // namespace lowbit::torch
