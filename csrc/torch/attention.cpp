// SPDX-License-Identifier: Apache-2.0
// lowbit::attention_forward and lowbit::attention_backward. Everything about a call is an argument of its own (a score
// program is a list of integers), so that a graph that holds the op holds nothing else. The random numbers of dropout
// come from `seed`, a tensor: tracing never asks for its value.
#include "ops/attention.hpp"

#include <algorithm>

#include "ops/attention_mods.hpp"
#include "torch/arguments.hpp"

namespace lowbit::torch {
namespace {

// What the schemas of forward and backward share behind q, k, v.
constexpr char kScores[] =
    "float scale, bool causal, Tensor? mask, float dropout_p, Tensor? seed, int[] score_mod, Tensor[] score_captured";
constexpr char kMasks[] =
    "int[] mask_mod, Tensor[] mask_captured, Tensor[] blocks, int[] block_size, Tensor? sink";

template <Text name, class Op>
std::vector<int64_t> integers(Arguments<Op>& given) {
  std::vector<int64_t> numbers;
  for (const StableIValue value : get<name>(given).values(given.op)) numbers.push_back(to_int(value));
  return numbers;
}

template <Text name, class Op>
std::vector<Tensor> tensors(Arguments<Op>& given) { return get<name>(given).tensors(given.op); }

// The mods of a call, with the tensors and numbers that they point into.
class Mods {
 public:
  template <class Op>
  explicit Mods(Arguments<Op>& given)
      : score_code_(integers<"score_mod">(given)), mask_code_(integers<"mask_mod">(given)),
        block_size_(integers<"block_size">(given)), score_captured_(tensors<"score_captured">(given)),
        mask_captured_(tensors<"mask_captured">(given)), blocks_(tensors<"blocks">(given)),
        mods_(given.op, {score_code_, views(score_captured_, given.op, "score_captured")},
              {mask_code_, views(mask_captured_, given.op, "mask_captured")}, views(blocks_, given.op, "blocks"),
              block_size(given.op)) {}
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

// Dense, in the order of the strides of `like`, the last dimension innermost. Heads that came in transposed leave
// transposed, so that transposing back gives dense rows.
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

template <class Op>
AttentionForwardArgs forward_args(Arguments<Op>& given, const Mods& mods) {
  AttentionForwardArgs args{.q = dense_view<"q">(given), .k = dense_view<"k">(given), .v = dense_view<"v">(given)};
  args.mask = stretched(view<"mask">(given), args.q, args.k);
  args.sink = contiguous_view<"sink">(given);
  args.scale = get<"scale">(given), args.causal = get<"causal">(given);
  args.dropout_p = get<"dropout_p">(given), args.seed = view<"seed">(given);
  args.score_mod = mods->score_mod(), args.mask_mod = mods->mask_mod(), args.lists = mods->lists;
  for (const auto& [name, view] :
       {std::pair{"q", &args.q}, {"k", &args.k}, {"v", &args.v}})  // before the result is allocated
    check(view->rank == 4, ErrorKind::value, given.op, ": ", name, " must have shape [B, H, length, E], got ",
          shape_text(*view));
  const DType dtype = args.q.dtype;
  check(is_activation(dtype) || dtype == DType::float64, ErrorKind::type, given.op,
        ": q must be float32, bfloat16, float16 or float64, got ", name_of(dtype));
  return args;
}

struct Forward {
  static constexpr Text schema =
      joined("attention_forward(Tensor q, Tensor k, Tensor v, ", kScores, ", ", kMasks,
             ", bool want_max_scores=False, bool real_out=False) -> (Tensor, Tensor, Tensor)");

  static std::array<Tensor, 3> run(Arguments<Forward>& given) {
    const Mods mods(given);
    AttentionForwardArgs args = forward_args(given, mods);
    const bool want_max_scores = get<"want_max_scores">(given);
    const int64_t shape[] = {args.q.shape[0], args.q.shape[1], args.q.shape[2], args.v.shape[3]}, none[] = {0};
    args.out = ordered_view(get<"real_out">(given) ? real_of(args.q.dtype) : args.q.dtype, shape, args.q);
    args.lse = contiguous_view(args.q.device, real_of(args.q.dtype), 3, shape);
    args.max_scores = want_max_scores ? args.lse : contiguous_view(args.q.device, args.lse.dtype, 1, none);
    std::array results{Tensor::empty(given.op, args.out), Tensor::empty(given.op, args.lse),
                       Tensor::empty(given.op, args.max_scores)};
    if (!want_max_scores) args.max_scores = {};
    attention_forward(args);
    return results;
  }
};

// The results of the backward, in the order of its list: grad_q, grad_k, grad_v, then those that are asked for.
class Gradients {
 public:
  explicit Gradients(std::string_view op) : op_(op) {}
  TensorView contiguous(DType dtype, const TensorView& like) {
    return made(contiguous_view(like.device, dtype, like.rank, like.shape.data()));
  }
  TensorView ordered(const TensorView& like) { return made(ordered_view(like.dtype, like.shape.data(), like)); }
  List list() {
    List list = List::empty(op_, tensors_.size());
    for (Tensor& tensor : tensors_) list.push(op_, std::move(tensor));
    return list;
  }

 private:
  TensorView made(TensorView view) {
    tensors_.push_back(Tensor::empty(op_, view));
    return view;
  }
  std::string_view op_;
  std::vector<Tensor> tensors_;
};

struct Backward {
  static constexpr Text schema =
      joined("attention_backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor grad_out, ",
             "Tensor? grad_lse, ", kScores, ", bool[] score_captured_needs, ", kMasks,
             ", bool mask_needs, bool sink_needs) -> Tensor[]");

  static List run(Arguments<Backward>& given) {
    const Mods mods(given);
    AttentionBackwardArgs args;
    AttentionForwardArgs& forward = args.forward = forward_args(given, mods);
    forward.out = dense_view<"out">(given), forward.lse = contiguous_view<"lse">(given);
    args.grad_out = dense_view<"grad_out">(given), args.grad_lse = contiguous_view<"grad_lse">(given);

    Gradients gradients(given.op);
    args.grad_q = gradients.ordered(forward.q), args.grad_k = gradients.ordered(forward.k),
    args.grad_v = gradients.ordered(forward.v);
    if (get<"mask_needs">(given)) {
      args.grad_mask =
          stretched(gradients.contiguous(real_of(forward.q.dtype), view<"mask">(given)), forward.q, forward.k);
    }
    const bool sink_needs = get<"sink_needs">(given);
    check(!sink_needs || forward.sink, ErrorKind::value, given.op, ": sink_needs must be False without a sink");
    if (sink_needs) args.grad_sink = gradients.contiguous(forward.sink.dtype, forward.sink);
    const std::vector<TensorView> captured = captured_gradients(given, mods, gradients);
    args.grad_captured = captured;
    attention_backward(args);
    return gradients.list();
  }

  static std::vector<TensorView> captured_gradients(Arguments<Backward>& given, const Mods& mods,
                                                    Gradients& gradients) {
    const std::vector<StableIValue> needs = get<"score_captured_needs">(given).values(given.op);
    check(needs.size() <= mods.score_captured().size(), ErrorKind::value, given.op,
          ": score_captured_needs must have at most ", mods.score_captured().size(), " entries, got ", needs.size());
    std::vector<TensorView> made;
    for (size_t i = 0; i < needs.size(); i++) {
      const TensorView captured = mods.score_captured()[i].view(given.op, "score_captured");
      made.push_back(to_bool(needs[i]) ? gradients.contiguous(captured.dtype, captured) : TensorView{});
    }
    return made;
  }
};

}  // namespace

const RegisteredOp attention_forward_op = registered<Forward>();
const RegisteredOp attention_backward_op = registered<Backward>();

}  // namespace lowbit::torch
