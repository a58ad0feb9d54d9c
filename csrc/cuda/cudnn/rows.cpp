// SPDX-License-Identifier: Apache-2.0
// cuDNN's rows of attention, bfloat16 and float16. Those that come before our own have no mask but causality. Those with
// a float mask, few queries or a window have been planned, and never ran on a GPU: they come last, and serve what our
// own refuse and who forces them. Calls in which cuDNN would break a promise of the ops are refused: dropout (the op
// defines the random numbers), programs, gradients with a float mask (probabilities of a row of large scores need more
// digits of its lse).
#include "cuda/backend.hpp"
#include "cuda/cudnn/call.hpp"
#include "cuda/cudnn/library.hpp"
#include "cuda/cudnn/plan_cache.hpp"

namespace lowbit::cuda {
namespace {

// A plan is for one pair of lengths. With few queries, as in decoding, each call has a different number of keys, and
// would wait half a second for its plan.
constexpr int64_t kMinQueries = 64;

bool is_aligned(const TensorView& view) {  // loads are of 16 bytes
  for (int i = 0; i < 3; i++)
    if (view.shape[i] != 1 && (view.stride[i] % 8 != 0 || view.stride[i] == 0)) return false;
  return reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
}

// Anything but a mask.
template <class Args>
std::string_view refuses_scores(const Args& args) {
  if (args.score_mod) return "a score_mod";
  if (args.q.dtype != DType::bfloat16 && args.q.dtype != DType::float16) return "not bfloat16 or float16";
  if (args.sink) return "a sink";
  if (args.kv_length() == 0) return "no keys";
  if (!is_aligned(args.q) || !is_aligned(args.k) || !is_aligned(args.v) || !is_aligned(args.out))
    return "strides that are not multiples of 16 bytes, or an address that is not";
  return "";
}

std::string_view refuses_options(const AttentionForwardArgs& args) {
  if (args.mask_mod || args.lists.kv_num_blocks) return "a mask_mod or block mask";
  if (args.cu_seqlens) return kPackedSequences;
  if (args.dropout_p > 0) return "dropout: its random numbers are not those of the op";
  if (args.max_scores) return "largest scores are wanted";
  if (args.out.dtype != args.q.dtype) return "a float32 result";
  return refuses_scores(args);
}

// The first that refuses.
template <class Args>
std::string_view refuses_plan(std::string_view reason, const Args& args) {
  if (!reason.empty()) return reason;
  if (!cudnn_missing().empty()) return cudnn_missing();
  return plan_for(cudnn_call(args).shape, args.place).refused;
}

std::string_view refuses_exact(const AttentionForwardArgs& args) {
  if (args.mask) return "a mask: rows that it hides whole have to be 0";
  if (!args.lse) return "no lse";
  if (args.q_length() < kMinQueries) return "fewer than 64 queries";
  return refuses_options(args);
}
std::string_view refuses(const AttentionForwardArgs& args) { return refuses_plan(refuses_exact(args), args); }

std::string_view refuses(const AttentionBackwardArgs& args) {
  if (args.grad_lse) return "a gradient of lse";
  if (!is_aligned(args.grad_out) || !is_aligned(args.grad_q) || !is_aligned(args.grad_k) || !is_aligned(args.grad_v))
    return "strides of gradients that are not multiples of 16 bytes, or an address that is not";
  return refuses_plan(refuses_exact(args.forward), args);
}

std::string_view refuses_mask(const TensorView& mask) {
  if (mask && mask.dtype == DType::boolean) return "a bool mask: cuDNN adds floats";
  return mask && mask.dtype == DType::float64 ? "a float64 mask" : "";
}

std::string_view refuses_bias(const AttentionForwardArgs& args) {
  const std::string_view reason = refuses_mask(args.mask);
  return refuses_plan(reason.empty() ? refuses_options(args) : reason, args);
}

std::string_view refuses_decode_options(const DecodeArgs& args) {
  if (args.format() != KvFormat::floating) return "a cache of codes";
  if (args.k.dtype != args.q.dtype) return "q has another dtype than keys and values";
  if (args.mask_mod) return "a mask_mod";
  if (args.causal && args.position < 0) return "queries before the first key";
  if (args.causal && args.position + args.q_length() > args.kv_length()) return "queries behind the last key";
  if (args.window && args.position - args.window + 1 >= args.kv_length()) return "a window behind the last key";
  if (args.window && !args.causal && args.q_length() > 1) return "a window without causality";
  const std::string_view reason = refuses_mask(args.mask);
  return reason.empty() ? refuses_scores(args) : reason;
}
std::string_view refuses_decode(const DecodeArgs& args) { return refuses_plan(refuses_decode_options(args), args); }

template <class Args>
void run(const Args& args) {
  const CudnnCall call = cudnn_call(args);
  const Plan& plan = plan_for(call.shape, args.place);
  const Workspace workspace("attention", args.place, plan.workspace > 0 ? plan.workspace : 16);
  {
    const HandleFor handle(args.place);
    run_plan(plan, handle.get(), call.tensors, workspace.at(0));
  }
  if (call.shape.bias_dtype != DType::other) clear_hidden_rows(call, args.place);
}

constexpr Kernel<AttentionForwardArgs> kForward[] = {{"attention_forward_cudnn", refuses, run}};
constexpr Kernel<AttentionBackwardArgs> kBackward[] = {{"attention_backward_cudnn", refuses, run}};
constexpr Kernel<AttentionForwardArgs> kForwardOfBias[] = {{"attention_forward_bias_cudnn", refuses_bias, run}};
constexpr Kernel<DecodeArgs> kDecode[] = {{"decode_cudnn", refuses_decode, run}};

}  // namespace

void add_cudnn_rows(Backend& backend) {
  add_rows(backend, kForward, std::size(kForward));
  add_rows(backend, kBackward, std::size(kBackward));
}

void add_planned_cudnn_rows(Backend& backend) {
  add_rows(backend, kForwardOfBias, std::size(kForwardOfBias));
  add_rows(backend, kDecode, std::size(kDecode));
}

}  // namespace lowbit::cuda
