// SPDX-License-Identifier: Apache-2.0
// linear_cross_entropy: the losses of rows of x [T, H] against labels, over a head [V, H], without logits in memory:
//
//   s[v]    = cap(scale * (x @ head[v] + bias[v])),   cap(u) = softcap * tanh(u / softcap), or u if softcap is 0
//   lse     = log(sum over v of exp(s[v]))
//   loss    = lse - (1 - smoothing) * s[label] - smoothing / V * sum over v of s[v] + z_loss * lse^2
//
// A row whose label is ignore_index is not computed: its loss, lse and gradient are 0. With row_weight, the gradients of
// sum over t of row_weight[t] * loss[t] come with it: by x, and by a float head and the bias where they are wanted.
#pragma once

#include "core/tensor_view.hpp"
#include "formats/format.hpp"
#include "ops/kernel.hpp"
#include "ops/linear_formats.hpp"

namespace lowbit {

struct LinearCrossEntropyArgs {
  Place place{};
  WeightSpec spec;  // of the head; a float head has the format of its dtype
  XFormat x_format = XFormat::floating;
  TensorView x;           // [T, H] float32, bfloat16 or float16, contiguous
  TensorView head;        // [panels, panel_bytes] uint8, packed; or [V, H] of the three dtypes; contiguous
  TensorView labels;      // [T] int64, contiguous: 0 to V - 1 or ignore_index; the row checks them before it writes
  TensorView bias;        // [V] of the three dtypes, contiguous; or none
  TensorView row_weight;  // [T] float32, contiguous; or none, and no gradients
  int64_t ignore_index = -100;
  float scale = 1, softcap = 0, smoothing = 0, z_loss = 0;
  bool of_x = false, of_head = false, of_bias = false;  // the gradients that are wanted
  // Written. Gradients that are not wanted are empty.
  TensorView loss{}, lse{};  // [T] float32
  TensorView grad_x{};       // [T, H], dtype of x
  TensorView grad_head{};    // [V, H], dtype of the head
  TensorView grad_bias{};    // [V], dtype of the bias

  int64_t rows() const { return x.size(0); }
  bool packed() const { return head.dtype == DType::uint8; }
};

// Checks all arguments but those that are written, except the numbers in `labels`. format, group_size, asymmetric: of a
// packed head; for a float head the format must be that of its dtype, without groups.
LOWBIT_API LinearCrossEntropyArgs linear_cross_entropy_args(const LinearCrossEntropyArgs& given, int64_t x_format);
LOWBIT_API Call describe(const LinearCrossEntropyArgs& args);

}  // namespace lowbit
