// SPDX-License-Identifier: Apache-2.0
// lowbit::attention_forward and lowbit::attention_backward. Everything that a call depends on is an argument (a score
// program is a list of integers), so that a graph with the op is self-contained. The random numbers of dropout come
// from `seed`, a tensor, so that tracing never needs its value.
#include "ops/attention.hpp"

#include <algorithm>

#include "ops/attention_mods.hpp"
#include "torch/arguments.hpp"

namespace lowbit::torch {
namespace {

// The arguments in the schemas of forward and backward after q, k, v.
constexpr char kScores[] =
    "float scale, bool causal, Tensor? mask, float dropout_p, Tensor? seed, int[] score_mod, Tensor[] score_captured";
constexpr char kMasks[] =
    "int[] mask_mod, Tensor[] mask_captured, Tensor[] blocks, int[] block_size, Tensor? sink";

// A list of tensors with their views.
template <class Held>
struct Tensors {
  Tensors(std::vector<Held> list, std::string_view op, std::string_view name) : held(std::move(list)) {
    for (const Held& tensor : held) views.push_back(tensor.view(op, name));
  }
  std::vector<Held> held;
  std::vector<TensorView> views;
};
template <Text name, class Given>
auto tensors(Given& given) { return Tensors(get<name>(given).tensors(given.op), given.op, name); }

// The mods of a call, with the tensors and numbers that they refer to.
template <class Given>
class Mods {
 public:
  explicit Mods(Given& given)
      : score_code_(integers<"score_mod">(given)), mask_code_(integers<"mask_mod">(given)),
        block_size_(integers<"block_size">(given)), score_captured_(tensors<"score_captured">(given)),
        mask_captured_(tensors<"mask_captured">(given)), blocks_(tensors<"blocks">(given)),
        mods_(given.op, {score_code_, score_captured_.views}, {mask_code_, mask_captured_.views}, blocks_.views,
              block_size()) {}
  const AttentionMods* operator->() const { return &mods_; }
  const std::vector<TensorView>& score_captured() const { return score_captured_.views; }

 private:
  std::pair<int64_t, int64_t> block_size() const {
    check(block_size_.size() == 2, ErrorKind::value, Given::op, ": block_size must be two numbers, got ",
          block_size_.size());
    return {block_size_[0], block_size_[1]};
  }
  using List = decltype(tensors<"blocks">(std::declval<Given&>()));
  std::vector<int64_t> score_code_, mask_code_, block_size_;
  List score_captured_, mask_captured_, blocks_;
  AttentionMods mods_;
};

// A dense view, ordered by the strides of `like`, the last dimension innermost. The result of transposed heads is
// transposed too, so that transposing it back gives dense rows.
TensorView ordered_view(DType dtype, const int64_t* shape, const TensorView& like) {
  int order[] = {0, 1, 2};
  const bool broadcast = std::any_of(order, order + 3, [&](int i) { return like.stride[i] == 0; });
  // Equal strides keep their order. Not by std::stable_sort, which allocates memory for three numbers.
  const auto key = [&](int i) { return std::pair(-like.stride[i], i); };
  if (!broadcast) std::sort(order, order + 3, [&](int a, int b) { return key(a) < key(b); });
  const int64_t permuted[] = {shape[order[0]], shape[order[1]], shape[order[2]], shape[3]};
  const TensorView dense = contiguous_view(like.device, dtype, 4, permuted);
  TensorView view = dense;
  for (int i = 0; i < 3; i++) view.shape[order[i]] = dense.shape[i], view.stride[order[i]] = dense.stride[i];
  return view;
}

template <class Given>
AttentionForwardArgs forward_args(Given& given, const Mods<Given>& mods) {
  AttentionForwardArgs args{.q = dense_view<"q">(given), .k = dense_view<"k">(given), .v = dense_view<"v">(given)};
  args.mask = stretched(view<"mask">(given), args.q, args.k);
  args.sink = contiguous_view<"sink">(given);
  args.scale = get<"scale">(given), args.causal = get<"causal">(given);
  args.dropout_p = get<"dropout_p">(given), args.seed = view<"seed">(given);
  args.score_mod = mods->score_mod(), args.mask_mod = mods->mask_mod(), args.lists = mods->lists;
  return args;
}

template <class Given>
struct ForwardCall {  // checked; results have no data yet
  explicit ForwardCall(Given& given) : mods(given), args(forward_args(given, mods)) {
    const TensorView& q = args.q;
    const int64_t shape[] = {q.shape[0], q.shape[1], q.shape[2], args.v.shape[3]};
    const DType real = real_of(q.dtype);
    args.out = ordered_view(get<"real_out">(given) ? real : q.dtype, shape, q);
    args.lse = contiguous_view(q.device, real, 3, shape);
    if (get<"want_max_scores">(given)) args.max_scores = args.lse;
    check_args(args);
  }
  Mods<Given> mods;
  AttentionForwardArgs args;
};

struct Forward {
  static constexpr Text schema =
      joined("attention_forward(Tensor q, Tensor k, Tensor v, ", kScores, ", ", kMasks,
             ", bool want_max_scores=False, bool real_out=False) -> (Tensor, Tensor, Tensor)");

  template <class Given>
  static ForwardCall<Given> args_of(Given& given) { return ForwardCall<Given>(given); }

  static std::array<Tensor, 3> run(Arguments<Forward>& given) {
    ForwardCall call = args_of(given);
    AttentionForwardArgs& args = call.args;
    const int64_t none[] = {0};
    TensorView unwanted = contiguous_view(args.q.device, args.lse.dtype, 1, none);
    std::array results{Tensor::empty(given.op, args.out), Tensor::empty(given.op, args.lse),
                       Tensor::empty(given.op, args.max_scores ? args.max_scores : unwanted)};
    attention_forward(args);
    return results;
  }
};

template <class Given>
struct BackwardCall {
  explicit BackwardCall(Given& given) : mods(given) {
    AttentionForwardArgs& forward = args.forward = forward_args(given, mods);
    const TensorView &q = forward.q, &k = forward.k, &v = forward.v;
    forward.out = dense_view<"out">(given), forward.lse = contiguous_view<"lse">(given);
    args.grad_out = dense_view<"grad_out">(given), args.grad_lse = contiguous_view<"grad_lse">(given);
    args.grad_q = ordered_view(q.dtype, q.shape.data(), q), args.grad_k = ordered_view(k.dtype, k.shape.data(), k),
    args.grad_v = ordered_view(v.dtype, v.shape.data(), v);
    const DType real = real_of(q.dtype);
    if (get<"mask_needs">(given)) args.grad_mask = stretched(contiguous_like(view<"mask">(given), real), q, k);
    if (get<"sink_needs">(given)) args.grad_sink = contiguous_like(forward.sink, real);
    const std::vector<int64_t> needs = integers<"score_captured_needs">(given);
    const std::vector<TensorView>& captured = mods.score_captured();
    check(needs.size() <= captured.size(), ErrorKind::value, given.op, ": score_captured_needs must have at most ",
          captured.size(), " entries, got ", needs.size());
    for (std::size_t i = 0; i < needs.size(); i++)
      grad_captured.push_back(to_bool(needs[i]) ? contiguous_like(captured[i], captured[i].dtype) : TensorView{});
    args.grad_captured = grad_captured;
    check_args(args);
  }
  Mods<Given> mods;
  AttentionBackwardArgs args;
  std::vector<TensorView> grad_captured;
};

struct Backward {
  static constexpr Text schema =
      joined("attention_backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor grad_out, ",
             "Tensor? grad_lse, ", kScores, ", bool[] score_captured_needs, ", kMasks,
             ", bool mask_needs, bool sink_needs) -> Tensor[]");

  template <class Given>
  static BackwardCall<Given> args_of(Given& given) { return BackwardCall<Given>(given); }

  // Returns grad_q, grad_k, grad_v, then the optional gradients.
  static List run(Arguments<Backward>& given) {
    BackwardCall call = args_of(given);
    AttentionBackwardArgs& args = call.args;
    List gradients = List::empty(given.op, 5 + call.grad_captured.size());
    for (TensorView* gradient : {&args.grad_q, &args.grad_k, &args.grad_v, &args.grad_mask, &args.grad_sink})
      if (*gradient) gradients.push(given.op, to_value(stored(given.op, *gradient)));
    for (TensorView& gradient : call.grad_captured)
      if (gradient) gradients.push(given.op, to_value(stored(given.op, gradient)));
    attention_backward(args);
    return gradients;
  }

  // A tensor for the elements of the view: an expanded dimension has size 1.
  static Tensor stored(std::string_view op, TensorView& view) {
    TensorView whole = view;
    for (int i = 0; i < view.rank; i++)
      if (view.stride[i] == 0) whole.shape[i] = whole.stride[i] = 1;
    Tensor tensor = Tensor::empty(op, whole);
    view.data = whole.data;
    return tensor;
  }
};

}  // namespace

const RegisteredOp attention_forward_op = registered<Forward>();
const RegisteredOp attention_backward_op = registered<Backward>();

}  // namespace lowbit::torch
