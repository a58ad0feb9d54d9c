// SPDX-License-Identifier: Apache-2.0
#include "cuda/cudnn/call.hpp"

#include <algorithm>

namespace lowbit::cuda {
namespace {

// A dimension of 1 gets the stride of a dense tensor, whatever the caller's is: one plan for all of them.
std::array<int64_t, 3> strides_of(const TensorView& view) {
  std::array<int64_t, 3> strides{view.stride[0], view.stride[1], view.stride[2]};
  for (int i = 0; i < 3; i++) {
    if (view.shape[i] != 1) continue;
    strides[i] = view.shape[3];
    for (int j = 0; j < 3; j++)
      if (view.shape[j] != 1) strides[i] = std::max(strides[i], view.stride[j] * view.shape[j]);
  }
  return strides;
}

void add(CudnnCall& call, AttentionShape::Tensor which, const TensorView& view) {
  call.shape.stride[which] = strides_of(view), call.tensors[which] = view.data;
}

// A dimension that is stretched by a stride of 0 has size 1, with the stride of a dense tensor.
void add_bias(CudnnCall& call, const TensorView& mask) {
  if (!mask) return;
  AttentionShape& shape = call.shape;
  shape.bias_dtype = mask.dtype, call.tensors[AttentionShape::bias] = mask.data;
  int64_t dense = 1;
  for (int d = 3; d >= 0; d--) {
    const bool is_one = mask.stride[d] == 0 || mask.shape[d] == 1;
    shape.bias_size[d] = is_one ? 1 : mask.shape[d], shape.bias_stride[d] = is_one ? dense : mask.stride[d];
    dense = std::max(dense, shape.bias_size[d] * shape.bias_stride[d]);
  }
}

// `k` and `v` may be a part of the keys and values of the call.
template <class Args>
CudnnCall call_of(const Args& args, const TensorView& k, const TensorView& v, const TensorView& mask) {
  CudnnCall call{.shape = {.batch = args.batch(), .heads = args.heads(), .kv_heads = args.kv_heads(),
                           .q_length = args.q_length(), .kv_length = k.size(2), .e = args.q.size(3),
                           .ev = args.out.size(3), .scale = static_cast<float>(args.scale), .dtype = args.q.dtype,
                           .causal = args.causal, .has_lse = static_cast<bool>(args.lse)}};
  add(call, AttentionShape::q, args.q), add(call, AttentionShape::k, k), add(call, AttentionShape::v, v);
  add(call, AttentionShape::out, args.out), add_bias(call, mask);
  call.tensors[AttentionShape::lse] = args.lse.data;
  return call;
}

// Positions from `first` on, `count` of them, of dimension d.
TensorView part_of(TensorView whole, int d, int64_t first, int64_t count) {
  if (!whole) return whole;
  whole.data = static_cast<char*>(whole.data) + first * whole.stride[d] * static_cast<int64_t>(size_of(whole.dtype));
  whole.shape[d] = count;
  return whole;
}

}  // namespace

CudnnCall cudnn_call(const AttentionForwardArgs& args) { return call_of(args, args.k, args.v, args.mask); }

CudnnCall cudnn_call(const AttentionBackwardArgs& args) {
  using enum AttentionShape::Tensor;
  CudnnCall call = cudnn_call(args.forward);
  call.shape.backward = true;
  add(call, grad_out, args.grad_out), add(call, grad_q, args.grad_q);
  add(call, grad_k, args.grad_k), add(call, grad_v, args.grad_v);
  return call;
}

CudnnCall cudnn_call(const DecodeArgs& args) {
  const int64_t end = args.causal ? args.position + args.q_length() : args.kv_length(),
                first = args.window ? std::max<int64_t>(0, args.position + 1 - args.window) : 0, keys = end - first;
  CudnnCall call = call_of(args, part_of(args.k, 2, first, keys), part_of(args.v, 2, first, keys),
                           part_of(args.mask, 3, first, keys));
  AttentionShape& shape = call.shape;
  shape.ends_together = true;
  if (args.q_length() == 1) shape.causal = false;  // it sees all keys that are left
  else if (args.window < keys) shape.window = args.window;
  return call;
}

}  // namespace lowbit::cuda
