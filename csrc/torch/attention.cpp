// SPDX-License-Identifier: Apache-2.0
// lowbit::attention_forward and lowbit::attention_backward. Everything about a call is an argument of its own (a score
// program is a list of integers), so that a graph that holds the op holds nothing else. The random numbers of dropout
// come from `seed`, a tensor: tracing never asks for its value.
#include "ops/attention.hpp"

#include <algorithm>

#include "ops/attention_mods.hpp"
#include "torch/boxed.hpp"
#include "torch/ops.hpp"

namespace lowbit::torch {
namespace {

std::vector<int64_t> integers(const List& list, std::string_view op) {
  std::vector<int64_t> numbers;
  for (const StableIValue value : list.values(op)) numbers.push_back(to_int(value));
  return numbers;
}

// What the schemas of forward and backward share behind q, k, v; read in their order.
struct Scores {
  double scale;
  bool causal;
  Tensor mask;
  double dropout_p;
  Tensor seed;
  List score_mod, score_captured;
};

Scores take_scores(Arguments& arguments) {
  return {.scale = arguments.number(),
          .causal = arguments.boolean(),
          .mask = arguments.optional_tensor(),
          .dropout_p = arguments.number(),
          .seed = arguments.optional_tensor(),
          .score_mod = arguments.list(),
          .score_captured = arguments.list()};
}

struct Masks {
  List mask_mod, mask_captured, blocks, block_size;
  Tensor sink;
};

Masks take_masks(Arguments& arguments) {
  return {.mask_mod = arguments.list(),
          .mask_captured = arguments.list(),
          .blocks = arguments.list(),
          .block_size = arguments.list(),
          .sink = arguments.optional_tensor()};
}

// The mods of a call, with the tensors and numbers that they point into.
class Mods {
 public:
  Mods(std::string_view op, const Scores& scores, const Masks& masks)
      : score_code_(integers(scores.score_mod, op)), mask_code_(integers(masks.mask_mod, op)),
        block_size_(integers(masks.block_size, op)), score_captured_(scores.score_captured.tensors(op)),
        mask_captured_(masks.mask_captured.tensors(op)), blocks_(masks.blocks.tensors(op)),
        mods_(op, {score_code_, views(score_captured_, op, "score_captured")},
              {mask_code_, views(mask_captured_, op, "mask_captured")}, views(blocks_, op, "blocks"), block_size(op)) {}
  const AttentionMods* operator->() const { return &mods_; }
  const std::vector<Tensor>& score_captured() const { return score_captured_; }

 private:
  std::pair<int64_t, int64_t> block_size(std::string_view op) const {
    check(block_size_.size() == 2, ErrorKind::value, op, ": block_size must be two numbers, got ", block_size_.size());
    return {block_size_[0], block_size_[1]};
  }
  std::vector<int64_t> score_code_, mask_code_, block_size_;
  std::vector<Tensor> score_captured_, mask_captured_, blocks_;
  AttentionMods mods_;
};

// Dense, in the order of the strides of `like`, the last dimension innermost: what leaves transposed heads leaves them
// so for who transposes back.
TensorView ordered_view(DType dtype, const int64_t* shape, const TensorView& like) {
  int order[] = {0, 1, 2};
  const bool broadcast = std::any_of(order, order + 3, [&](int i) { return like.stride[i] == 0; });
  if (!broadcast) std::stable_sort(order, order + 3, [&](int a, int b) { return like.stride[a] > like.stride[b]; });
  const int64_t permuted[] = {shape[order[0]], shape[order[1]], shape[order[2]], shape[3]};
  const TensorView dense = contiguous_view(like.device, dtype, 4, permuted);
  TensorView view = dense;
  for (int i = 0; i < 3; i++) view.shape[order[i]] = dense.shape[i], view.stride[order[i]] = dense.stride[i];
  return view;
}

// Sizes of 1 stretched to [B, Hq, L, S] by strides of 0; other sizes are left to the checks of attention.
TensorView stretched(TensorView view, const TensorView& q, const TensorView& k) {
  const int64_t full[] = {q.shape[0], q.shape[1], q.shape[2], k.shape[2]};
  for (int i = 0; view.rank == 4 && i < 4; i++)
    if (view.shape[i] == 1 && full[i] != 1) view.shape[i] = full[i], view.stride[i] = 0;
  return view;
}

AttentionForwardArgs forward_args(std::string_view op, Tensor& q, Tensor& k, Tensor& v, Scores& scores, Masks& masks) {
  AttentionForwardArgs args{.q = q.dense_view(op, "q"), .k = k.dense_view(op, "k"), .v = v.dense_view(op, "v")};
  args.mask = stretched(scores.mask.view(op, "mask"), args.q, args.k);
  args.sink = masks.sink.contiguous_view(op, "sink");
  args.scale = scores.scale, args.causal = scores.causal, args.dropout_p = scores.dropout_p,
  args.seed = scores.seed.view(op, "seed");
  for (const auto& [name, view] :
       {std::pair{"q", &args.q}, {"k", &args.k}, {"v", &args.v}})  // before the result is allocated
    check(view->rank == 4, ErrorKind::value, op, ": ", name, " must have shape [B, H, length, E], got ",
          shape_text(*view));
  const DType dtype = args.q.dtype;
  check(is_activation(dtype) || dtype == DType::float64, ErrorKind::type, op,
        ": q must be float32, bfloat16, float16 or float64, got ", name_of(dtype));
  return args;
}

void forward_kernel(StableIValue* stack) {
  constexpr std::string_view op = "attention_forward";
  Arguments arguments(stack);
  Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor();
  Scores scores = take_scores(arguments);
  Masks masks = take_masks(arguments);
  const bool want_max_scores = arguments.boolean(), real_out = arguments.boolean();

  const Mods mods(op, scores, masks);
  AttentionForwardArgs args = forward_args(op, q, k, v, scores, masks);
  args.score_mod = mods->score_mod(), args.mask_mod = mods->mask_mod();
  const int64_t shape[] = {args.q.shape[0], args.q.shape[1], args.q.shape[2], args.v.shape[3]}, none[] = {0};
  args.out = ordered_view(real_out ? real_of(args.q.dtype) : args.q.dtype, shape, args.q);
  args.lse = contiguous_view(args.q.device, real_of(args.q.dtype), 3, shape);
  args.max_scores = want_max_scores ? args.lse : contiguous_view(args.q.device, args.lse.dtype, 1, none);
  Tensor out = Tensor::empty(op, args.out), lse = Tensor::empty(op, args.lse),
         max_scores = Tensor::empty(op, args.max_scores);
  if (!want_max_scores) args.max_scores = {};
  args.lists = mods->lists;
  attention_forward(args);
  stack[0] = to_value(std::move(out)), stack[1] = to_value(std::move(lse)), stack[2] = to_value(std::move(max_scores));
}

// The results of the backward, in the order of its list: grad_q, grad_k, grad_v, then those that are asked for.
class Gradients {
 public:
  explicit Gradients(std::string_view op) : op_(op) {}
  TensorView contiguous(DType dtype, const TensorView& like) {
    return made(contiguous_view(like.device, dtype, like.rank, like.shape.data()));
  }
  TensorView ordered(const TensorView& like) { return made(ordered_view(like.dtype, like.shape.data(), like)); }
  StableIValue list() {
    List list = List::empty(op_, tensors_.size());
    for (Tensor& tensor : tensors_) list.push(op_, std::move(tensor));
    return to_value(std::move(list));
  }

 private:
  TensorView made(TensorView view) {
    tensors_.push_back(Tensor::empty(op_, view));
    return view;
  }
  std::string_view op_;
  std::vector<Tensor> tensors_;
};

void backward_kernel(StableIValue* stack) {
  constexpr std::string_view op = "attention_backward";
  Arguments arguments(stack);
  Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor(), out = arguments.tensor(),
         lse = arguments.tensor();
  Tensor grad_out = arguments.tensor(), grad_lse = arguments.optional_tensor();
  Scores scores = take_scores(arguments);
  const List captured_needs = arguments.list();
  Masks masks = take_masks(arguments);
  const bool mask_needs = arguments.boolean(), sink_needs = arguments.boolean();

  const Mods mods(op, scores, masks);
  AttentionBackwardArgs args;
  args.forward = forward_args(op, q, k, v, scores, masks);
  AttentionForwardArgs& forward = args.forward;
  forward.score_mod = mods->score_mod(), forward.mask_mod = mods->mask_mod();
  forward.out = out.dense_view(op, "out"), forward.lse = lse.contiguous_view(op, "lse");
  args.grad_out = grad_out.dense_view(op, "grad_out"), args.grad_lse = grad_lse.contiguous_view(op, "grad_lse");

  Gradients gradients(op);
  args.grad_q = gradients.ordered(forward.q), args.grad_k = gradients.ordered(forward.k),
  args.grad_v = gradients.ordered(forward.v);
  if (mask_needs) {
    args.grad_mask =
        stretched(gradients.contiguous(real_of(forward.q.dtype), scores.mask.view(op, "mask")), forward.q, forward.k);
  }
  check(!sink_needs || forward.sink, ErrorKind::value, op, ": sink_needs must be False without a sink");
  if (sink_needs) args.grad_sink = gradients.contiguous(forward.sink.dtype, forward.sink);
  std::vector<TensorView> captured_gradients;
  const std::vector<StableIValue> needs = captured_needs.values(op);
  check(needs.size() <= mods.score_captured().size(), ErrorKind::value, op, ": score_captured_needs must have at most ",
        mods.score_captured().size(), " entries, got ", needs.size());
  for (size_t i = 0; i < needs.size(); i++) {
    const TensorView captured = mods.score_captured()[i].view(op, "score_captured");
    captured_gradients.push_back(to_bool(needs[i]) ? gradients.contiguous(captured.dtype, captured) : TensorView{});
  }
  forward.lists = mods->lists, args.grad_captured = captured_gradients;
  attention_backward(args);
  stack[0] = gradients.list();
}

}  // namespace

const Op attention_forward_op = {
    "attention_forward",
    "attention_forward(Tensor q, Tensor k, Tensor v, float scale, bool causal, Tensor? mask, float dropout_p, Tensor? "
    "seed, int[] score_mod, "
    "Tensor[] score_captured, int[] mask_mod, Tensor[] mask_captured, Tensor[] blocks, int[] block_size, Tensor? sink, "
    "bool want_max_scores=False, bool real_out=False) -> (Tensor, Tensor, Tensor)",
    boxed<forward_kernel>};

const Op attention_backward_op = {"attention_backward",
                                  "attention_backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor "
                                  "grad_out, Tensor? grad_lse, float scale, bool causal, "
                                  "Tensor? mask, float dropout_p, Tensor? seed, int[] score_mod, Tensor[] "
                                  "score_captured, bool[] score_captured_needs, int[] mask_mod, "
                                  "Tensor[] mask_captured, Tensor[] blocks, int[] block_size, Tensor? sink, bool "
                                  "mask_needs, bool sink_needs) -> Tensor[]",
                                  boxed<backward_kernel>};

}  // namespace lowbit::torch
