// SPDX-License-Identifier: Apache-2.0
// Constants of a step for all elements of a tensor, computed by each CTA from the tensor's step count, or by the host.
#pragma once

#include "core/random.hpp"
#include "gpu/optim/table.hpp"

namespace lowbit::gpu {

template <class Rule>
struct Constants {
  Rule rule;
  uint64_t seed;
  int64_t block_size;
  float grad_factor, keep, l2;  // keep: 1 - lr * weight_decay if decoupled, else 1; l2: weight_decay if not decoupled
  bool scaled, negated, adds_l2, stochastic;

  LOWBIT_INLINE Constants(const StepOptions& of, const OptimTensor& tensor, int64_t position, double step)
      : rule(of.hyper, step), seed(of.stochastic_rounding ? tensor_seed(of.seed, step, position) : 0),
        block_size(of.block_size), grad_factor(1.0f / (of.grad_scale ? *of.grad_scale : 1.0f)),
        keep(static_cast<float>(of.hyper.decoupled ? 1 - of.hyper.lr * of.hyper.weight_decay : 1.0)),
        l2(static_cast<float>(of.hyper.weight_decay)), scaled(of.grad_scale && *of.grad_scale != 1.0f),
        negated(of.hyper.maximize), adds_l2(of.hyper.weight_decay != 0 && !of.hyper.decoupled),
        stochastic(of.stochastic_rounding && tensor.param_dtype == DType::bfloat16) {}
};

}  // namespace lowbit::gpu
