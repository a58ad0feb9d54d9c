// SPDX-License-Identifier: Apache-2.0
// selective_scan, the state space model of Mamba-1 (Gu and Dao, 2312.00752): per channel a state h [S], of which each
// number decays with a speed of its own, and to which each token adds its input times its B.
//   delta_t = clamp(f(dt_t + dt_bias), dt_min, dt_max),   f the identity or softplus
//   h = exp(delta_t A) h + delta_t x_t B_t
//   y_t = (C_t . h + D x_t) silu(z_t)
// In float32, y and the final state rounded once.
#pragma once

#include "core/tensor_view.hpp"
#include "ops/kernel.hpp"

namespace lowbit {

struct SelectiveScanArgs {
  Place place{};
  TensorView x{};            // [B, T, D] float32, bfloat16 or float16, dense rows, any other strides
  TensorView dt{};           // [B, T, D], any of the three dtypes, dense rows, finite
  TensorView a{};            // A [D, S], any of the three dtypes, contiguous; finite and at most 0
  TensorView b{}, c{};       // B, C [B, T, G, S], dtype of x, dense rows; D a multiple of G
  TensorView d{}, dt_bias{}; // D, dt_bias [D], any of the three dtypes, contiguous; or none: zeros. dt_bias is finite
  TensorView z{};            // [B, T, D], dtype of x, dense rows; or none: no gate
  TensorView state{};        // [N, D, S] float32 or bfloat16, contiguous; or none: zeros
  bool softplus = false;
  double dt_min = 0;         // finite, at least 0
  double dt_max = 0;         // at least dt_min, or infinity
  TensorView cu_seqlens{};   // [N + 1] int32 or int64, contiguous: sequence n is tokens cu_seqlens[n] to
                             // cu_seqlens[n + 1] - 1, and B is 1; or none: N = B sequences of T tokens
  TensorView y{};            // [B, T, D], dtype of x, contiguous: written
  TensorView final_state{};  // [N, D, S], state_dtype(), contiguous: written; may be the memory of `state`

  int64_t batch() const { return x.size(0); }
  int64_t tokens() const { return x.size(1); }
  int64_t channels() const { return x.size(2); }
  int64_t groups() const { return b.size(2); }
  int64_t s() const { return b.size(3); }
  DType state_dtype() const { return state ? state.dtype : DType::float32; }
  int64_t sequences() const { return cu_seqlens ? cu_seqlens.size(0) - 1 : batch(); }
};

// Checks all arguments but the results. The row checks the values of dt, A, dt_bias and cu_seqlens before it writes
// anything.
LOWBIT_API SelectiveScanArgs selective_scan_args(const SelectiveScanArgs& given);
LOWBIT_API Call describe(const SelectiveScanArgs& args);

struct SelectiveScanBackwardArgs {
  Place place{};
  SelectiveScanArgs forward{};    // without its results
  TensorView grad_y{};            // shape and dtype of x, dense rows, any other strides
  TensorView grad_final_state{};  // [N, D, S], dtype of the final state, contiguous; or none: zeros
  // Written, contiguous: shapes and dtypes of the inputs, empty for those that are none, and [N, D, S] in that of
  // the final state, which may be the memory of grad_final_state.
  TensorView grad_x{}, grad_dt{}, grad_a{}, grad_b{}, grad_c{}, grad_d{}, grad_z{}, grad_dt_bias{}, grad_state{};
};

// Checks all arguments but the gradients of the inputs.
LOWBIT_API SelectiveScanBackwardArgs selective_scan_backward_args(const SelectiveScanBackwardArgs& given);
LOWBIT_API Call describe(const SelectiveScanBackwardArgs& args);

}  // namespace lowbit
