// SPDX-License-Identifier: Apache-2.0
// cuDNN's rows of attention: bfloat16 and float16, no mask but causality. Our own rows serve the calls in which cuDNN
// would break a promise of the ops: rows of scores hidden entirely by a mask (their result must be 0; cuDNN's is not
// known yet), dropout (the op defines the random numbers), programs.
#include "cuda/backend.hpp"
#include "cuda/cudnn/library.hpp"
#include "cuda/cudnn/plan_cache.hpp"
#include "ops/attention.hpp"

namespace lowbit::cuda {
namespace {

// A plan is for one pair of lengths. With few queries, as in decoding, each call has a different number of keys, and
// would wait half a second for its plan.
constexpr int64_t kMinQueries = 64;

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

AttentionShape shape_of(const AttentionForwardArgs& args) {
  AttentionShape shape{.batch = args.batch(), .heads = args.heads(), .kv_heads = args.kv_heads(),
                       .q_length = args.q_length(), .kv_length = args.kv_length(), .e = args.q.size(3),
                       .ev = args.ev(), .scale = static_cast<float>(args.scale), .dtype = args.q.dtype,
                       .causal = args.causal};
  using enum AttentionShape::Tensor;
  shape.stride[q] = strides_of(args.q), shape.stride[k] = strides_of(args.k), shape.stride[v] = strides_of(args.v);
  shape.stride[out] = strides_of(args.out);
  return shape;
}

AttentionShape shape_of(const AttentionBackwardArgs& args) {
  AttentionShape shape = shape_of(args.forward);
  using enum AttentionShape::Tensor;
  shape.backward = true;
  shape.stride[grad_out] = strides_of(args.grad_out), shape.stride[grad_q] = strides_of(args.grad_q);
  shape.stride[grad_k] = strides_of(args.grad_k), shape.stride[grad_v] = strides_of(args.grad_v);
  return shape;
}

bool is_aligned(const TensorView& view) {  // loads are of 16 bytes
  for (int i = 0; i < 3; i++)
    if (view.shape[i] != 1 && (view.stride[i] % 8 != 0 || view.stride[i] == 0)) return false;
  return reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
}

std::string_view refuses_scores(const AttentionForwardArgs& args) {
  if (args.score_mod) return "a score_mod";
  if (args.q.dtype != DType::bfloat16 && args.q.dtype != DType::float16) return "not bfloat16 or float16";
  if (args.mask_mod || args.lists.kv_num_blocks) return "a mask_mod or block mask";
  if (args.mask) return "a mask: rows that it hides whole have to be 0";
  if (args.sink) return "a sink";
  if (args.cu_seqlens) return kPackedSequences;
  if (args.dropout_p > 0) return "dropout: its random numbers are not those of the op";
  if (args.max_scores) return "largest scores are wanted";
  if (args.out.dtype != args.q.dtype) return "a float32 result";
  if (!args.lse) return "no lse";
  if (args.q_length() < kMinQueries) return "fewer than 64 queries";
  if (args.kv_length() == 0) return "no keys";
  if (!is_aligned(args.q) || !is_aligned(args.k) || !is_aligned(args.v) || !is_aligned(args.out))
    return "strides that are not multiples of 16 bytes, or an address that is not";
  return cudnn_missing();
}

std::string_view refuses(const AttentionForwardArgs& args) {
  const std::string_view reason = refuses_scores(args);
  return reason.empty() ? std::string_view(plan_for(shape_of(args), args.place).refused) : reason;
}

std::string_view refuses(const AttentionBackwardArgs& args) {
  if (args.grad_lse) return "a gradient of lse";
  if (!is_aligned(args.grad_out) || !is_aligned(args.grad_q) || !is_aligned(args.grad_k) || !is_aligned(args.grad_v))
    return "strides of gradients that are not multiples of 16 bytes, or an address that is not";
  const std::string_view reason = refuses_scores(args.forward);
  return reason.empty() ? std::string_view(plan_for(shape_of(args), args.place).refused) : reason;
}

std::vector<void*> tensors_of(const AttentionForwardArgs& args) {
  return {args.q.data, args.k.data, args.v.data, args.out.data, args.lse.data};
}
std::vector<void*> tensors_of(const AttentionBackwardArgs& args) {
  std::vector<void*> tensors = tensors_of(args.forward);
  for (const TensorView* of : {&args.grad_out, &args.grad_q, &args.grad_k, &args.grad_v}) tensors.push_back(of->data);
  return tensors;
}

template <class Args>
void run(const Args& args) {
  std::vector<void*> tensors = tensors_of(args);
  const Plan& plan = plan_for(shape_of(args), args.place);
  const Workspace workspace("attention", args.place, plan.workspace > 0 ? plan.workspace : 16);
  const HandleFor handle(args.place);
  run_plan(plan, handle.get(), tensors, workspace.at(0));
}

constexpr Kernel<AttentionForwardArgs> kForward[] = {{"attention_forward_cudnn", refuses, run}};
constexpr Kernel<AttentionBackwardArgs> kBackward[] = {{"attention_backward_cudnn", refuses, run}};

}  // namespace

void add_cudnn_rows(Backend& backend) {
  add_rows(backend, kForward, std::size(kForward));
  add_rows(backend, kBackward, std::size(kBackward));
}

}  // namespace lowbit::cuda
