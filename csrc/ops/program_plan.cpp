// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "core/bits.hpp"
#include "core/parallel.hpp"
#include "ops/program_run.hpp"

namespace lowbit {

namespace {

std::vector<TensorView> without_data(std::span<const TensorView> views) {
  std::vector<TensorView> all(views.begin(), views.end());
  for (TensorView& view : all) view.data = nullptr;
  return all;
}

// Steps whose arguments depend on the number of tokens in the caches, on masks, or are columns of what another step made,
// so that each run makes them.
template <class Step>
constexpr bool kGrows = std::is_same_v<Step, RopeAppendStep> || std::is_same_v<Step, AttentionStep> ||
                        std::is_same_v<Step, SelfAttentionStep> || std::is_same_v<Step, CrossAttentionStep> ||
                        std::is_same_v<Step, MaskRowsStep> || std::is_same_v<Step, ScaleColumnsStep> ||
                        std::is_same_v<Step, HeadsStep> || kRecurrent<Step>;
// Steps that call a kernel row.
template <class Step>
constexpr bool kComputes = !std::is_same_v<Step, ScoreModStep> && !std::is_same_v<Step, ColumnsStep>;

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
        } else if constexpr (std::is_same_v<Step, MaskRowsStep>) {
          if (!not_given(run.view(step.mask))) run.args(step);
        } else if constexpr (std::is_same_v<Step, HeadsStep>) {
          const HeadsArgs args = run.args(step);
          if (!step.into) add(ProgramRun::result_of(args));
        } else if constexpr (std::is_same_v<Step, ScaleColumnsStep>) {
          run.args(step);
        } else if constexpr (kGrows<Step>) {
          add(ProgramRun::result_of(run.args(step)));
        } else if constexpr (kComputes<Step>) {
          const auto args = run.args(step);
          fixed_[i] = args;
          if constexpr (std::is_same_v<Step, RouteStep>) add(args.weights), add(args.index);
          else if constexpr (std::is_same_v<Step, ExpertsStep>) add(with_columns(run.view(step.x), step.down_spec.n));
          else if constexpr (std::is_same_v<Step, HeadLinearStep>)
            add(with_columns(run.view(step.x), args.y.size(1) * args.y.size(2)));
          else if constexpr (!std::is_same_v<Step, LinearStep>) add(args.y);
          else if (!step.into) add(with_columns(run.view(step.x), step.spec.n));
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
    while (program_->result_of[step] < static_cast<int32_t>(i)) step++;
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
      if constexpr (std::is_same_v<Step, MaskRowsStep>) {
        if (!not_given(run.view(step.mask))) run.args(step);
        return true;
      } else if constexpr (std::is_same_v<Step, HeadsStep>) {
        const HeadsArgs args = run.args(step);
        return step.into ||
               alike(ProgramRun::result_of(args), results_[static_cast<std::size_t>(program_->result_of[i])].view);
      } else if constexpr (std::is_same_v<Step, ScaleColumnsStep>) {
        return true;
      } else if constexpr (kGrows<Step>) {
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
        if constexpr (kGrows<Step>) run.run(step, result);
        else if constexpr (kComputes<Step>) run.run(step, std::get<decltype(run.args(step))>(fixed_[i]), result);
      };
      std::visit(call, program_->steps[i]);
    }
  });
}

}  // namespace lowbit
