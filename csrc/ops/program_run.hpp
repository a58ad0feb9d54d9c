// SPDX-License-Identifier: Apache-2.0
// The operands of a call of a program, and the arguments of its steps.
#pragma once

#include <algorithm>
#include <tuple>

#include "ops/attention_mods.hpp"
#include "ops/checks.hpp"
#include "ops/preferred_row.hpp"
#include "ops/program.hpp"
#include "ops/program_code.hpp"
#include "ops/program_views.hpp"

namespace lowbit {

template <class Step>
constexpr bool kRecurrent = std::is_same_v<Step, CausalConv1dStep> || std::is_same_v<Step, GatedDeltaRuleStep> ||
                            std::is_same_v<Step, SsdStep> || std::is_same_v<Step, SelectiveScanStep> ||
                            std::is_same_v<Step, GatedRmsNormStep>;

// The operands of one call. While a plan is made, results have no data.
class ProgramRun {
  using enum ErrorKind;

 public:
  ProgramRun(const Program& program, const ProgramTensors& tensors, std::span<const ProgramPlan::Result> results,
             char* memory = nullptr, void* y = nullptr)
      : program_(program), tensors_(tensors), results_(results), memory_(memory), y_(y) {}

  static void check_counts(const Program& program, const ProgramTensors& tensors) {
    const std::tuple<std::string_view, int32_t, std::size_t> counts[] = {
        {"constants", program.constants, tensors.constants.size()},
        {"states", program.states, tensors.states.size()},
        {"inputs", program.inputs, tensors.inputs.size()},
        {"starts", program.starts, tensors.starts.size()}};
    for (const auto& [name, wanted, got] : counts)
      check(static_cast<std::size_t>(wanted) == got, value, kRunProgram, ": ", name, " must be the ", wanted,
            " that program names, got ", got);
    for (const int64_t start : tensors.starts)
      check(start >= 0 && start <= INT32_MAX, value, kRunProgram, ": starts must be numbers of tokens, got ", start);
  }

  TensorView view(const Operand& operand) const {
    const auto index = static_cast<std::size_t>(operand.index);
    switch (operand.kind) {
      case Operand::Kind::constant: return tensors_.constants[index];
      case Operand::Kind::state: return tensors_.states[index];
      case Operand::Kind::input: return tensors_.inputs[index];
      case Operand::Kind::result: break;
      case Operand::Kind::none: return {};
    }
    TensorView result = results_[index].view;
    result.data = address(operand);
    return result;
  }

  void* address(const Operand& operand) const {
    const auto index = static_cast<std::size_t>(operand.index);
    if (operand.kind == Operand::Kind::result) return result(operand.index);
    return operand.kind == Operand::Kind::none       ? nullptr
           : operand.kind == Operand::Kind::constant ? tensors_.constants[index].data
           : operand.kind == Operand::Kind::state    ? tensors_.states[index].data
                                                     : tensors_.inputs[index].data;
  }

  void* result(int32_t index) const {
    const auto at = static_cast<std::size_t>(index);
    if (at + 1 == program_.last_use.size()) return y_;
    return memory_ ? memory_ + results_[at].offset : nullptr;
  }

  int64_t start(int64_t index) const { return tensors_.starts[static_cast<std::size_t>(index)]; }

  RmsNormArgs args(const RmsNormStep& step) const {
    RmsNormArgs args = rms_norm_args(view(step.x), view(step.weight), step.eps, step.offset, view(step.add));
    args.y = with_columns(args.x, args.x.size(-1));
    return args;
  }

  LayerNormArgs args(const LayerNormStep& step) const {
    LayerNormArgs args =
        layer_norm_args(view(step.x), view(step.weight), view(step.bias), step.eps, step.offset, view(step.add));
    args.y = with_columns(args.x, args.x.size(-1));
    return args;
  }

  PointwiseArgs args(const PointwiseStep& step) const {
    TensorView x = view(step.x), add = view(step.add), gate = view(step.gate);
    check(x.rank >= 1, value, step.op, ": x must have shape [..., n], got ", shape_text(x));
    TensorView y = with_columns(x, x.size(-1));
    y.dtype = step.result.value_or(x.dtype);
    if (step.gate_size) {
      const int64_t heads = x.size(-1) / step.gate_size;
      check(heads * step.gate_size == x.size(-1), value, step.op, ": x must have heads of ", step.gate_size,
            " columns, got ", shape_text(x));
      x = heads_of(step.op, "x", x, 0, heads, step.gate_size);
      if (add) add = heads_of(step.op, "add", add, 0, heads, step.gate_size);
      gate = heads_of(step.op, "gate", gate, step.gate_column, heads, step.gate_size, step.gate_step);
    }
    PointwiseArgs args = pointwise_args(x, step.function, step.scale, add, step.positive, step.negative, step.linear,
                                        gate, step.op, step.result);
    args.y = y;
    args.gate_function = step.gate_function;
    return args;
  }

  PointwiseArgs args(const MaskRowsStep& step) const { return step_args(step, view(step.x), view(step.mask)); }
  PointwiseArgs args(const ScaleColumnsStep& step) const { return step_args(step, view(step.x), view(step.factors)); }
  CausalConv1dArgs args(const CausalConv1dStep& step) const {
    return step_args(step, view(step.x), view(step.weight), view(step.state), view(step.bias));
  }
  GatedDeltaRuleArgs args(const GatedDeltaRuleStep& step) const {
    return step_args(step, view(step.qkv), view(step.g), view(step.beta), view(step.state), view(step.a_log),
                     view(step.dt_bias));
  }
  SsdArgs args(const SsdStep& step) const {
    return step_args(step, view(step.xbc), view(step.dt), view(step.a), view(step.state), view(step.d),
                     view(step.dt_bias));
  }
  SelectiveScanArgs args(const SelectiveScanStep& step) const {
    return step_args(step, view(step.x), view(step.dt), view(step.a), view(step.b), view(step.c), view(step.state),
                     view(step.d), view(step.dt_bias), view(step.z));
  }
  GatedRmsNormArgs args(const GatedRmsNormStep& step) const {
    return step_args(step, view(step.x), view(step.gate), view(step.weight));
  }
  HeadsArgs args(const HeadsStep& step) const {
    return step_args(step, view(step.x), view(step.cos), view(step.sin), view(step.weight), view(step.into),
                     step.start < 0 ? 0 : start(step.start));
  }
  GatherLinearArgs args(const HeadLinearStep& step) const { return step_args(step, view(step.x), view(step.weight)); }

  LinearArgs args(const LinearStep& step) const {
    const TensorView x = view(step.x), y = with_columns(x, step.spec.n);
    check(x.rank >= 1, value, "linear: x must have shape [..., k], got ", shape_text(x));
    if (step.into) check_part(step, x);
    LinearArgs args = linear_args({x, view(step.weight), view(step.bias), view(step.mul), view(step.add), y}, step.spec,
                                  step.x_format, step.activation);
    if (step.inner) add_low_rank(args, view(step.inner), view(step.up), step.parts);
    return args;
  }

  RouteArgs args(const RouteStep& step) const {
    RouteArgs args = step.numbers;
    const TensorView x = as_rows(view(step.x));
    if (step.weight) args.router = {x, view(step.weight), view(step.bias), step.rounds};
    else args.logits = x;
    args.correction = view(step.correction), args.expert_scale = view(step.expert_scale);
    args = route_args(args, step.scoring);
    args.weights = shaped({.dtype = DType::float32, .device = x.device}, {args.tokens(), args.k});
    args.index = shaped({.dtype = DType::int64, .device = x.device}, {args.tokens(), args.k});
    return args;
  }

  ExpertsArgs args(const ExpertsStep& step) const {
    ExpertsArgs args{.x = as_rows(view(step.x)),
                     .gate_up = {.spec = step.gate_up_spec, .packed = view(step.gate_up),
                                 .bias = view(step.gate_up_bias)},
                     .down = {.spec = step.down_spec, .packed = view(step.down), .bias = view(step.down_bias)},
                     .index = view(step.index), .weights = view(step.weights), .gate = step.gate};
    args = experts_args(args, step.gate_up_x_format, step.down_x_format, step.activation);
    args.y = shaped({.dtype = args.x.dtype, .device = args.x.device}, {args.tokens(), args.down.spec.n});
    return args;
  }

  void check_part(const LinearStep& step, const TensorView& x) const {
    const TensorView whole = view(step.into);
    check(x.numel() == x.size(-1), value, "x must have one row where a product writes a part of a row, got ",
          shape_text(x));
    check(step.first_column >= 0 && step.first_column <= whole.size(-1) - step.spec.n &&
              whole.numel() == whole.size(-1) && whole.dtype == x.dtype,
          value, "into must be one row with room for ", step.spec.n, " columns from ", step.first_column, " on, got ",
          shape_text(whole));
  }

  // Checks the arguments too.
  RopeAppendArgs args(const RopeAppendStep& step) const {
    const TensorView qkv = view(step.qkv), keys = view(step.keys);
    const int64_t e = keys.rank == 4 ? keys.size(3) : 0;
    check(qkv.rank == 3, value, "qkv must have shape [B, L, (Hq + 2 Hkv) E], got ", shape_text(qkv));
    check(e > 0 && qkv.size(2) % e == 0, value,
          "the outputs of qkv must be heads of E, the last dimension of keys [B, Hkv, S, E], got ", qkv.size(2),
          " outputs and keys of shape ", shape_text(keys));
    check_contiguous("rope_append", "qkv", qkv);
    RopeAppendArgs args{.qkv = shaped(qkv, {qkv.size(0), qkv.size(1), qkv.size(2) / e, e}),
                        .cos = step.cos ? view(step.cos) : shaped(qkv, {1, qkv.size(1), 0}),
                        .sin = step.sin ? view(step.sin) : shaped(qkv, {1, qkv.size(1), 0}),
                        .q_weight = view(step.q_weight), .k_weight = view(step.k_weight),
                        .eps = step.eps, .offset = step.offset, .start = start(step.start),
                        .keys = keys, .values = view(step.values), .rotated = {},
                        .rotation = step.rotation, .grouped = step.grouped, .norm_behind = step.norm_behind,
                        .gated = step.gated};
    check_args(args);
    TensorView rotated = shaped(qkv, {args.batch(), args.heads(), args.tokens(), e});
    rotated.data = nullptr;
    args.rotated = rotated;
    return args;
  }

  // Checks the arguments too.
  AttentionForwardArgs args(const AttentionStep& step) const {
    AttentionForwardArgs args{.q = view(step.q), .k = view(step.keys), .v = view(step.values)};
    if (args.q.rank == 3 && args.k.rank == 4) args.q = heads_as_keys(args.q, args.k);
    check(args.q.rank == 4 && args.k.rank == 4 && args.v.rank == 4, value,
          "q, keys and values must have four dimensions, got ", shape_text(args.q), ", ", shape_text(args.k), " and ",
          shape_text(args.v));
    const int64_t tokens = args.q.size(2), before = start(step.start), seen = before + tokens;
    check(before >= 0 && seen <= args.k.size(2) && seen <= args.v.size(2), value, "keys must have room for tokens ",
          before, " to ", seen, ", got ", std::min(args.k.size(2), args.v.size(2)));
    args.k.shape[2] = args.v.shape[2] = seen;
    args.out = heads_behind_tokens(args.q, args.v.size(3));
    if (!set_mask(args, step.mask, step.cu_seqlens) && step.causal && tokens > 1) {
      check(before == 0, value, "a mask must be given for more than one token behind others, got ", tokens,
            " tokens behind ", before);
      args.causal = true;
    }
    args.sink = view(step.sink);
    args.scale = step.scale;
    args.score_mod = step.score < 0 ? nullptr : program_.scores[static_cast<std::size_t>(step.score)]->score_mod();
    check_args(args);
    return args;
  }

  // Checks the arguments too.
  AttentionForwardArgs args(const SelfAttentionStep& step) const {
    const TensorView qkv = view(step.qkv);
    check(qkv.rank == 3, value, "qkv must have shape [B, L, (Hq + 2 Hkv) E], got ", shape_text(qkv));
    const int64_t columns = qkv.size(2), kv = step.kv_heads * step.e;
    check(columns % step.e == 0 && columns > 2 * kv, value, "qkv must have columns for ", step.kv_heads,
          " heads of keys and values of ", step.e, ", and queries, got ", columns);
    check_contiguous("attention", "qkv", qkv);
    const auto heads_from = [&](int64_t column, int64_t heads) {
      return heads_before_tokens("qkv", qkv, column, heads, step.e);
    };
    const int64_t heads = columns / step.e - 2 * step.kv_heads;
    AttentionForwardArgs args{.q = heads_from(0, heads), .k = heads_from(heads * step.e, step.kv_heads),
                              .v = heads_from(heads * step.e + kv, step.kv_heads)};
    args.out = heads_behind_tokens(args.q, step.e);
    set_mask(args, step.mask, step.cu_seqlens);
    args.scale = step.scale;
    check_args(args);
    return args;
  }

  // Checks the arguments too.
  AttentionForwardArgs args(const CrossAttentionStep& step) const {
    const TensorView q = view(step.q);
    AttentionForwardArgs args{.q = {}, .k = view(step.keys), .v = view(step.values)};
    check(q.rank == 3 && args.k.rank == 4 && args.v.rank == 4, value,
          "q must have three dimensions, keys and values four, got ", shape_text(q), ", ", shape_text(args.k), " and ",
          shape_text(args.v));
    args.q = heads_as_keys(q, args.k);
    args.out = heads_behind_tokens(args.q, args.v.size(3));
    set_mask(args, step.mask, {});
    args.scale = step.scale;
    check_args(args);
    return args;
  }

  // The heads [B, Hq, L, E] of q [B, L, Hq E].
  static TensorView heads_as_keys(const TensorView& q, const TensorView& keys) {
    const int64_t e = keys.size(3);
    check(e > 0 && q.size(2) % e == 0, value, "the columns of q must be heads of E, the last dimension of keys, got ",
          q.size(2), " columns and keys of shape ", shape_text(keys));
    check_contiguous("attention", "q", q);
    return heads_before_tokens("q", q, 0, q.size(2) / e, e);
  }

  // The heads [B, heads, L, E] that begin at a column of x [B, L, columns].
  static TensorView heads_before_tokens(std::string_view name, const TensorView& x, int64_t column, int64_t heads,
                                        int64_t e) {
    TensorView part = heads_of("attention", name, x, column, heads, e);
    std::swap(part.shape[1], part.shape[2]);
    std::swap(part.stride[1], part.stride[2]);
    return part;
  }

  // [B, Hq, L, Ev] without data, in the memory order that the next product reads.
  static TensorView heads_behind_tokens(const TensorView& q, int64_t ev) {
    TensorView out = shaped(q, {q.size(0), q.size(2), q.size(1), ev});
    out.data = nullptr;
    std::swap(out.shape[1], out.shape[2]);
    std::swap(out.stride[1], out.stride[2]);
    return out;
  }

  // Sets mask and cu_seqlens where they are given; returns whether a mask is.
  bool set_mask(AttentionForwardArgs& args, const Operand& mask_operand, const Operand& sequences_operand) const {
    if (const TensorView sequences = view(sequences_operand); sequences && !not_given(sequences))
      args.cu_seqlens = sequences;
    const TensorView mask = view(mask_operand);
    if (!mask || not_given(mask)) return false;
    args.mask = args.cu_seqlens ? stretched(mask, args.heads()) : stretched(mask, args.q, args.k);
    return true;
  }

  static TensorView result_of(const RopeAppendArgs& args) { return args.rotated; }
  static TensorView result_of(const HeadsArgs& args) {
    TensorView of_tokens = args.rotated;
    std::swap(of_tokens.shape[1], of_tokens.shape[2]);
    return without_heads(of_tokens);
  }
  static TensorView result_of(const CausalConv1dArgs& args) { return args.y; }
  static TensorView result_of(const GatedDeltaRuleArgs& args) { return without_heads(args.o); }
  static TensorView result_of(const SelectiveScanArgs& args) { return args.y; }
  static TensorView result_of(const SsdArgs& args) { return without_heads(args.y); }
  static TensorView result_of(const GatedRmsNormArgs& args) { return without_heads(args.y); }
  static TensorView result_of(const AttentionForwardArgs& args) {
    return shaped(args.out, {args.out.size(0), args.out.size(2), args.out.size(1) * args.out.size(3)});
  }

  void run(const RmsNormStep& step, RmsNormArgs args, int32_t y) const {
    args.x.data = address(step.x), args.weight.data = address(step.weight), args.add.data = address(step.add);
    args.y.data = result(y);
    lowbit::run(args);
  }

  void run(const LayerNormStep& step, LayerNormArgs args, int32_t y) const {
    args.x.data = address(step.x), args.add.data = address(step.add);
    args.weight.data = address(step.weight), args.bias.data = address(step.bias);
    args.y.data = result(y);
    lowbit::run(args);
  }

  void run(const PointwiseStep& step, PointwiseArgs args, int32_t y) const {
    args.x.data = address(step.x), args.add.data = address(step.add), args.gate.data = address(step.gate);
    if (step.gate_size)
      args.gate.data = args.gate.as<char>() + step.gate_column * static_cast<int64_t>(size_of(args.x.dtype));
    args.y.data = result(y);
    lowbit::run(args);
  }

  void run(const LinearStep& step, LinearArgs args, int32_t y) const {
    args.x = address(step.x), args.weight = static_cast<const uint8_t*>(address(step.weight));
    args.bias = address(step.bias), args.mul = address(step.mul), args.add = address(step.add);
    args.low_rank.inner = address(step.inner), args.low_rank.up = address(step.up);
    args.y = step.into ? static_cast<char*>(address(step.into)) +
                             step.first_column * static_cast<int64_t>(size_of(args.dtype))
                       : static_cast<char*>(result(y));
    lowbit::run(args, step.row);
  }

  void run(const RouteStep& step, RouteArgs args, int32_t y) const {
    (step.weight ? args.router.x : args.logits).data = address(step.x);
    args.router.weight.data = address(step.weight), args.router.bias.data = address(step.bias);
    args.correction.data = address(step.correction), args.expert_scale.data = address(step.expert_scale);
    args.weights.data = result(y - 1), args.index.data = result(y);
    lowbit::run(args);
  }

  void run(const ExpertsStep& step, ExpertsArgs args, int32_t y) const {
    args.x.data = address(step.x), args.index.data = address(step.index), args.weights.data = address(step.weights);
    args.gate_up.packed.data = address(step.gate_up), args.gate_up.bias.data = address(step.gate_up_bias);
    args.down.packed.data = address(step.down), args.down.bias.data = address(step.down_bias);
    args.y.data = result(y);
    lowbit::run(args);
  }

  void run(const RopeAppendStep& step, int32_t y) const {
    RopeAppendArgs call = args(step);
    call.rotated.data = result(y);
    lowbit::run(call);
  }

  void run(const HeadsStep& step, int32_t y) const {
    HeadsArgs call = args(step);
    if (!step.into) call.rotated.data = result(y);
    lowbit::run<RopeAppendArgs>(call);
  }

  void run(const HeadLinearStep& step, GatherLinearArgs args, int32_t y) const {
    args.x.data = address(step.x), args.weight.data = address(step.weight);
    args.y.data = result(y);
    run_by_head(args);
  }

  void run(const MaskRowsStep& step, int32_t) const {
    if (!not_given(view(step.mask))) lowbit::run(args(step));
  }

  void run(const ScaleColumnsStep& step, int32_t) const { lowbit::run(args(step)); }

  template <class Step>
    requires kRecurrent<Step>
  void run(const Step& step, int32_t y) const {
    auto call = args(step);
    if constexpr (std::is_same_v<Step, GatedDeltaRuleStep>) call.o.data = result(y);
    else call.y.data = result(y);
    lowbit::run(call);
  }

  template <class Step>
    requires std::is_same_v<Step, AttentionStep> || std::is_same_v<Step, SelfAttentionStep> ||
             std::is_same_v<Step, CrossAttentionStep>
  void run(const Step& step, int32_t y) const {
    AttentionForwardArgs call = args(step);
    call.out.data = result(y);
    lowbit::run(call);
  }

 private:
  const Program& program_;
  const ProgramTensors& tensors_;
  std::span<const ProgramPlan::Result> results_;
  char* memory_;
  void* y_;
};

}  // namespace lowbit
