// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <tuple>
#include <utility>

#include "core/bits.hpp"
#include "core/parallel.hpp"
#include "ops/attention_mods.hpp"
#include "ops/checks.hpp"
#include "ops/preferred_row.hpp"
#include "ops/program.hpp"
#include "ops/program_code.hpp"

namespace lowbit {

using enum ErrorKind;

namespace {

TensorView shaped(TensorView view, std::initializer_list<int64_t> shape) {  // dense
  view.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), view.shape.begin());
  int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; i--) view.stride[i] = std::exchange(stride, stride * view.shape[i]);
  return view;
}

TensorView with_columns(const TensorView& x, int64_t columns) {  // [..., columns], dense
  TensorView view{.dtype = x.dtype, .device = x.device, .rank = x.rank};
  int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; i--) {
    view.shape[i] = i == view.rank - 1 ? columns : x.shape[i];
    view.stride[i] = std::exchange(stride, stride * view.shape[i]);
  }
  return view;
}

bool alike(const TensorView& a, const TensorView& b) {  // equal but for the address
  return a.dtype == b.dtype && a.device == b.device && a.rank == b.rank &&
         std::equal(a.shape.begin(), a.shape.begin() + a.rank, b.shape.begin()) &&
         std::equal(a.stride.begin(), a.stride.begin() + a.rank, b.stride.begin());
}

bool not_given(const TensorView& view) { return view.rank == 1 && view.size(0) == 0; }

std::vector<TensorView> without_data(std::span<const TensorView> views) {
  std::vector<TensorView> all(views.begin(), views.end());
  for (TensorView& view : all) view.data = nullptr;
  return all;
}

}  // namespace

// The operands of one call. While a plan is made, results have no data.
class ProgramRun {
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

  LinearArgs args(const LinearStep& step) const {
    const TensorView x = view(step.x), y = with_columns(x, step.spec.n);
    check(x.rank >= 1, value, "linear: x must have shape [..., k], got ", shape_text(x));
    if (step.into) check_part(step, x);
    return linear_args({x, view(step.weight), view(step.bias), view(step.mul), view(step.add), y}, step.spec,
                       step.x_format, step.activation);
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
                        .cos = view(step.cos), .sin = view(step.sin),
                        .q_weight = view(step.q_weight), .k_weight = view(step.k_weight),
                        .eps = step.eps, .offset = step.offset, .start = start(step.start),
                        .keys = keys, .values = view(step.values), .rotated = {}};
    check_args(args);
    TensorView rotated = shaped(qkv, {args.batch(), args.heads(), args.tokens(), e});
    rotated.data = nullptr;
    args.rotated = rotated;
    return args;
  }

  // Checks the arguments too.
  AttentionForwardArgs args(const AttentionStep& step) const {
    AttentionForwardArgs args{.q = view(step.q), .k = view(step.keys), .v = view(step.values)};
    check(args.q.rank == 4 && args.k.rank == 4 && args.v.rank == 4, value,
          "q, keys and values must have four dimensions, got ", shape_text(args.q), ", ", shape_text(args.k), " and ",
          shape_text(args.v));
    const int64_t tokens = args.q.size(2), before = start(step.start), seen = before + tokens;
    check(before >= 0 && seen <= args.k.size(2) && seen <= args.v.size(2), value, "keys must have room for tokens ",
          before, " to ", seen, ", got ", std::min(args.k.size(2), args.v.size(2)));
    args.k.shape[2] = args.v.shape[2] = seen;
    args.out = shaped(args.q, {args.q.size(0), tokens, args.q.size(1), args.v.size(3)});
    args.out.data = nullptr;
    std::swap(args.out.shape[1], args.out.shape[2]);  // [B, Hq, L, Ev], in the memory order that the next product reads
    std::swap(args.out.stride[1], args.out.stride[2]);
    const TensorView mask = view(step.mask);
    if (mask && !not_given(mask)) {
      args.mask = stretched(mask, args.q, args.k);
    } else if (step.causal && tokens > 1) {
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

  static TensorView result_of(const RopeAppendArgs& args) { return args.rotated; }
  static TensorView result_of(const AttentionForwardArgs& args) {
    return shaped(args.out, {args.out.size(0), args.out.size(2), args.out.size(1) * args.out.size(3)});
  }

  void run(const RmsNormStep& step, RmsNormArgs args, int32_t y) const {
    args.x.data = address(step.x), args.weight.data = address(step.weight), args.add.data = address(step.add);
    args.y.data = result(y);
    lowbit::run(args);
  }

  void run(const LinearStep& step, LinearArgs args, int32_t y) const {
    args.x = address(step.x), args.weight = static_cast<const uint8_t*>(address(step.weight));
    args.bias = address(step.bias), args.mul = address(step.mul), args.add = address(step.add);
    args.y = step.into ? static_cast<char*>(address(step.into)) +
                             step.first_column * static_cast<int64_t>(size_of(args.dtype))
                       : static_cast<char*>(result(y));
    lowbit::run(args, step.row);
  }

  void run(const RopeAppendStep& step, int32_t y) const {
    RopeAppendArgs call = args(step);
    call.rotated.data = result(y);
    lowbit::run(call);
  }

  void run(const AttentionStep& step, int32_t y) const {
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

namespace {

template <class Body>
auto of_step(std::size_t step, Body body) {  // adds the step's number to errors
  try {
    return body();
  } catch (const Error& error) {
    throw Error(error.kind, concat(kRunProgram, ": step ", step, ": ", error.what()));
  }
}

}  // namespace

ProgramPlan::ProgramPlan(std::shared_ptr<const Program> program, const ProgramTensors& tensors)
    : program_(std::move(program)), constants_(without_data(tensors.constants)),
      inputs_(without_data(tensors.inputs)) {
  ProgramRun::check_counts(*program_, tensors);
  fixed_.resize(program_->steps.size());
  results_.reserve(program_->last_use.size());
  const auto add = [this](const TensorView& view) { results_.push_back({view}), results_.back().view.data = nullptr; };
  for (std::size_t i = 0; i < program_->steps.size(); i++)
    of_step(i, [&] {
      const ProgramRun run(*program_, tensors, results_);
      const auto plan = [&]<class Step>(const Step& step) {
        if constexpr (std::is_same_v<Step, ColumnsStep>) {
          add(with_columns(run.view(step.x), step.columns));
        } else if constexpr (std::is_same_v<Step, RmsNormStep>) {
          add(std::get<RmsNormArgs>(fixed_[i] = run.args(step)).y);
        } else if constexpr (std::is_same_v<Step, LinearStep>) {
          fixed_[i] = run.args(step);
          if (!step.into) add(with_columns(run.view(step.x), step.spec.n));
        } else if constexpr (!std::is_same_v<Step, ScoreModStep>) {
          add(ProgramRun::result_of(run.args(step)));
        }
      };
      std::visit(plan, program_->steps[i]);
    });
  place_ = {.device = y().device, .stream = current_stream(y().device)};
  place_results();
}

// Puts each result into the first gap between those still needed: the less memory, the more of it stays in cache.
void ProgramPlan::place_results() {
  struct Held {
    int64_t begin, end;
    int32_t last_use;
  };
  std::vector<Held> held;  // ordered by begin
  for (std::size_t i = 0, step = 0; i + 1 < results_.size(); i++) {  // the last one belongs to the caller
    while (program_->result_of[step] != static_cast<int32_t>(i)) step++;
    std::erase_if(held, [&](const Held& other) { return other.last_use < static_cast<int32_t>(step); });
    const TensorView& view = results_[i].view;
    const int64_t size = round_up(view.numel() * static_cast<int64_t>(size_of(view.dtype)), 64);
    int64_t begin = 0;
    auto at = held.begin();
    for (; at != held.end() && at->begin - begin < size; ++at) begin = std::max(begin, at->end);
    held.insert(at, {begin, begin + size, program_->last_use[i]});
    results_[i].offset = begin;
    bytes_ = std::max(bytes_, begin + size);
  }
}

bool ProgramPlan::serves(const ProgramTensors& tensors) const {
  if (tensors.constants.size() != constants_.size() || tensors.inputs.size() != inputs_.size()) return false;
  for (const int32_t input : program_->shaping_inputs)
    if (const auto i = static_cast<std::size_t>(input); !alike(tensors.inputs[i], inputs_[i])) return false;
  if (current_stream(place_.device) != place_.stream) return false;
  for (std::size_t i = 0; i < constants_.size(); i++)
    if (!alike(tensors.constants[i], constants_[i])) return false;
  ProgramRun::check_counts(*program_, tensors);
  const ProgramRun run(*program_, tensors, results_);
  for (std::size_t i = 0; i < program_->steps.size(); i++) {
    const auto same = [&]<class Step>(const Step& step) {
      if constexpr (std::is_same_v<Step, RopeAppendStep> || std::is_same_v<Step, AttentionStep>) {
        const Result& result = results_[static_cast<std::size_t>(program_->result_of[i])];
        return alike(ProgramRun::result_of(run.args(step)), result.view);
      } else {
        return true;
      }
    };
    if (!of_step(i, [&] { return std::visit(same, program_->steps[i]); })) return false;
  }
  return true;
}

void ProgramPlan::run(const ProgramTensors& tensors, char* memory, void* y) const {
  const ProgramRun run(*program_, tensors, results_, memory, y);
  as_team([&] {
    for (std::size_t i = 0; i < program_->steps.size(); i++) {
      const int32_t result = program_->result_of[i];
      const auto call = [&]<class Step>(const Step& step) {
        if constexpr (std::is_same_v<Step, RmsNormStep>) run.run(step, std::get<RmsNormArgs>(fixed_[i]), result);
        else if constexpr (std::is_same_v<Step, LinearStep>) run.run(step, std::get<LinearArgs>(fixed_[i]), result);
        else if constexpr (std::is_same_v<Step, RopeAppendStep> || std::is_same_v<Step, AttentionStep>)
          run.run(step, result);
      };
      std::visit(call, program_->steps[i]);
    }
  });
}

}  // namespace lowbit
