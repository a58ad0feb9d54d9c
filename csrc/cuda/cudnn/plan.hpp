// SPDX-License-Identifier: Apache-2.0
// Plans of cuDNN for attention: a plan is made for one shape in 0.4 to 1.1 s (cuDNN 9.19, one core of a Zen 4), loaded
// in 2 ms, and run any number of times. Only frontend/plan.cpp includes cudnn-frontend; a build without its headers has
// frontend/missing.cpp instead.
#pragma once

#include <array>
#include <compare>
#include <memory>
#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "core/error.hpp"

namespace lowbit::cuda {

using CudnnHandle = struct HandleOfCudnn*;

// Everything that a plan depends on besides cuDNN and the device.
struct AttentionShape {
  // lse is contiguous, and may be absent from a forward; the last dimension of the others is dense.
  enum Tensor { q, k, v, out, grad_out, grad_q, grad_k, grad_v, lse, bias, kTensors };
  static constexpr int kRows = lse;  // tensors whose last dimension is that of a head

  int64_t batch = 0, heads = 0, kv_heads = 0, q_length = 0, kv_length = 0, e = 0, ev = 0;
  // Of batch, head and position, in elements; those of gradients are for a backward alone.
  std::array<std::array<int64_t, 3>, kRows> stride{};
  // Floats that are added to the scores, or `other`: none. A dimension with the same floats everywhere has size 1.
  DType bias_dtype = DType::other;
  std::array<int64_t, 4> bias_size{}, bias_stride{};
  float scale = 1;
  DType dtype = DType::bfloat16;
  bool causal = false, backward = false, has_lse = true;
  bool ends_together = false;  // causality and window: the last query is at the last key, not the first at the first
  int64_t window = 0;          // > 0: a query attends to no key `window` or more positions before it

  friend auto operator<=>(const AttentionShape&, const AttentionShape&) = default;

  std::array<int64_t, 4> sizes(Tensor tensor) const {
    if (tensor == lse) return {batch, heads, q_length, 1};
    if (tensor == bias) return bias_size;
    const bool keys = tensor == k || tensor == v || tensor == grad_k || tensor == grad_v;
    const bool values = tensor == v || tensor == out || tensor == grad_out || tensor == grad_v;
    return {batch, keys ? kv_heads : heads, keys ? kv_length : q_length, values ? ev : e};
  }
  std::array<int64_t, 4> strides(Tensor tensor) const {
    if (tensor == lse) return {heads * q_length, q_length, 1, 1};
    if (tensor == bias) return bias_stride;
    return {stride[tensor][0], stride[tensor][1], stride[tensor][2], 1};
  }
};

// The device of a plan: that of a handle, or one described by a text in cuDNN's format
// (CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION), so that plans can be made without a GPU.
struct CudnnDevice {
  CudnnHandle handle = nullptr;
  std::string description = {};
  int compute_capability = 0;  // 90
};

struct Plan {
  std::shared_ptr<const void> graph;  // null: see `refused`, in cuDNN's words
  std::string refused = {};
  int64_t workspace = 0;  // bytes
  std::vector<AttentionShape::Tensor> tensors = {};  // those that it reads and writes, in the order of their numbers
};

// Max workspace of a plan: float32 gradients of q, k and v for every head, and 256 MiB for other needs of a device
// (split keys of a long row).
LOWBIT_API int64_t max_workspace(const AttentionShape& shape);

LOWBIT_API bool has_cudnn_frontend();
LOWBIT_API Plan make_plan(const AttentionShape& shape, const CudnnDevice& device);
LOWBIT_API std::string image_of(const Plan& plan);
// Refused: the image belongs to something else, or is damaged.
LOWBIT_API Plan read_plan(const std::string& image, const CudnnDevice& device);

using AttentionTensors = std::array<void*, AttentionShape::kTensors>;  // by AttentionShape::Tensor

void run_plan(const Plan& plan, CudnnHandle handle, const AttentionTensors& tensors, void* workspace);

}  // namespace lowbit::cuda
