// SPDX-License-Identifier: Apache-2.0
// What follows the two products of experts: act(gate, up) of the sums of the first one, and the results of a token,
// weighted by its router and added in the order of its list.
#pragma once

#include "cuda/experts/product.cuh"

namespace lowbit::cuda {

LOWBIT_INLINE float activated(const GateCall& gate, float a) {
  switch (gate.activation) {
    case GateActivation::none: return a;
    case GateActivation::relu: return activate(Activation::relu, a);
    case GateActivation::gelu: return activate(Activation::gelu, a);
    case GateActivation::gelu_tanh: return activate(Activation::gelu_tanh, a);
    case GateActivation::silu: return __fdiv_rn(a, 1.0f + expf(-gate.alpha * a));
    case GateActivation::relu_squared: {
      const float most = activate(Activation::relu, a);
      return most * most;
    }
  }
  return a;
}

LOWBIT_INLINE float gated(const GateCall& gate, float a, float up) {
  if (gate.limit != 0.0f) {  // these comparisons keep nan
    a = a > gate.limit ? gate.limit : a;
    up = up > gate.limit ? gate.limit : up < -gate.limit ? -gate.limit : up;
  }
  return activated(gate, a) * (up + gate.up_offset);
}

// Element (row, n) of a product, with its epilogue.
template <Format kFormat, bool kCodes, int kTileGroups>
LOWBIT_INLINE float result_of(const ExpertsCall& given, const LinearCall& call, int64_t row, int64_t n) {
  using Result = std::conditional_t<kCodes && kTileGroups == 0, int32_t, float>;
  const auto* partial = static_cast<const Result*>(given.product.partial) + row * call.spec.n + n;
  Result whole = 0;
  for (int split = 0; split < given.product.splits; split++) whole += partial[split * call.m * call.spec.n];
  return finished_whole<kFormat, kCodes, kTileGroups>(call, ColumnEnds::of<kFormat>(call, n), row, n, whole);
}

// One thread per element of hidden.
template <Format kFormat, bool kCodes, int kTileGroups>
LOWBIT_INLINE void gate_experts(const ExpertsCall& given) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kLinearThreads + threadIdx.x, row = at / given.inner,
                i = at % given.inner;
  if (row >= given.all_rows()) return;
  float value = 0.0f;
  if (given.pair_of_row[row] >= 0) {
    const LinearCall call = call_of_expert(given, given.expert_of_block[row / given.rows_of_block]);
    const auto column = [&](int64_t n) { return result_of<kFormat, kCodes, kTileGroups>(given, call, row, n); };
    if (!given.gate.gated) value = activated(given.gate, column(i));
    else if (given.gate.interleaved) value = gated(given.gate, column(2 * i), column(2 * i + 1));
    else value = gated(given.gate, column(i), column(given.inner + i));
  }
  store_from_float(given.hidden, given.dtype, at, value);
}

// One thread per element of y.
template <Format kFormat, bool kCodes, int kTileGroups>
LOWBIT_INLINE void add_experts(const ExpertsCall& given) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kLinearThreads + threadIdx.x, token = at / given.n,
                n = at % given.n;
  if (token >= given.tokens) return;
  float sum = 0.0f;
  for (int64_t pair = token * given.each; pair < (token + 1) * given.each; pair++) {
    const int32_t row = given.row_of_pair[pair];
    if (row < 0) continue;
    const LinearCall call = call_of_expert(given, given.expert_of_block[row / given.rows_of_block]);
    sum = __fmaf_rn(load_as_float(given.weights, given.weights_dtype, pair),
                    result_of<kFormat, kCodes, kTileGroups>(given, call, row, n), sum);
  }
  store_from_float(given.y, given.dtype, at, sum);
}

}  // namespace lowbit::cuda
