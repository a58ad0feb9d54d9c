// SPDX-License-Identifier: Apache-2.0
// causal_conv1d: a convolution over time of each channel with itself, as it stands before the recurrent layers of
// Mamba-2, Qwen3-Next and LFM2. With K taps and u the inputs x, before them the state, and zeros before that:
//   y[t, d] = f(bias[d] + sum_j weight[d, j] u[t - (K - 1) + j, d]),   f the identity or silu
// In float32, y rounded once. The state is the last S inputs, S at least K - 1, to the bit.
#pragma once

#include "core/tensor_view.hpp"
#include "ops/kernel.hpp"

namespace lowbit {

inline constexpr int64_t kMaxTaps = 8;

struct CausalConv1dArgs {
  Place place{};
  TensorView x{};            // [B, T, D] float32, bfloat16 or float16, dense rows, any other strides
  TensorView weight{};       // [D, K], K from 2 to kMaxTaps, any of the three dtypes, any strides
  TensorView bias{};         // [D], any of the three dtypes, contiguous; or none
  TensorView state{};        // [N, D, S], dtype of x, S from K - 1 to kMaxTaps, any strides; or none: zeros, S = K - 1
  bool silu = false;
  TensorView cu_seqlens{};   // [N + 1] int32 or int64, contiguous: sequence n is tokens cu_seqlens[n] to
                             // cu_seqlens[n + 1] - 1, and B is 1; or none: N = B sequences of T tokens
  TensorView y{};            // [B, T, D], dtype of x, contiguous: written
  TensorView final_state{};  // [N, D, S], dtype of x, contiguous: written; may be the memory of a contiguous `state`

  int64_t batch() const { return x.size(0); }
  int64_t tokens() const { return x.size(1); }
  int64_t channels() const { return x.size(2); }
  int64_t taps() const { return weight.size(1); }
  int64_t kept() const { return state ? state.size(2) : taps() - 1; }  // S
  int64_t sequences() const { return cu_seqlens ? cu_seqlens.size(0) - 1 : batch(); }
};

// Checks all arguments but the results. The row checks the values of cu_seqlens before it writes anything.
LOWBIT_API CausalConv1dArgs causal_conv1d_args(const CausalConv1dArgs& given);
LOWBIT_API Call describe(const CausalConv1dArgs& args);

struct CausalConv1dBackwardArgs {
  Place place{};
  CausalConv1dArgs forward{};     // without its results
  TensorView grad_y{};            // shape and dtype of x, dense rows, any other strides
  TensorView grad_final_state{};  // [N, D, S], dtype of x, any strides; or none: zeros
  // Written, contiguous: shapes and dtypes of x, weight, bias (of weight without one) and state.
  TensorView grad_x{}, grad_weight{}, grad_bias{}, grad_state{};
};

// Checks all arguments but the gradients of the inputs.
LOWBIT_API CausalConv1dBackwardArgs causal_conv1d_backward_args(const CausalConv1dBackwardArgs& given);
LOWBIT_API Call describe(const CausalConv1dBackwardArgs& args);

}  // namespace lowbit
