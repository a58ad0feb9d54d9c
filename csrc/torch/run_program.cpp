// SPDX-License-Identifier: Apache-2.0
// lowbit::run_program_. A program of thousands of numbers and hundreds of weights is passed once and kept here:
//   [kKept, number, program...]  keep this program with these constants under the number, and run it
//   [kKept, number]              run it; constants must be none
// Only code that runs in this process may do so: the number has no meaning in another, such as one that loads a .pt2.
#include <atomic>
#include <map>
#include <mutex>

#include "core/once.hpp"
#include "ops/program.hpp"
#include "ops/program_code.hpp"
#include "torch/arguments.hpp"
#include "torch/kept_programs.hpp"

namespace lowbit::torch {
namespace {

constexpr int64_t kKept = 0;  // versions begin at 1

// A program with its constants. Their addresses are read in each call, as `.data = ` changes them.
struct KeptProgram {
  std::shared_ptr<const Program> program;
  std::vector<Tensor> constants;
  std::mutex mutex{};
  std::shared_ptr<const ProgramPlan> plan{};  // the plan of the last call
};

class KeptPrograms {
 public:
  int64_t new_number() { return ++last_; }
  void put(int64_t number, std::shared_ptr<KeptProgram> program) {
    const std::lock_guard lock(mutex_);
    programs_[number] = std::move(program);
  }
  std::shared_ptr<KeptProgram> get(int64_t number) {
    const std::lock_guard lock(mutex_);
    const auto found = programs_.find(number);
    check(found != programs_.end(), ErrorKind::value, kRunProgram,
          ": program must be kept in this process, got number ", number);
    return found->second;
  }
  void forget(int64_t number) {
    std::shared_ptr<KeptProgram> last;  // its tensors are freed outside the lock
    const std::lock_guard lock(mutex_);
    if (const auto found = programs_.find(number); found != programs_.end())
      last = std::move(found->second), programs_.erase(found);
  }

 private:
  std::atomic<int64_t> last_{0};
  std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<KeptProgram>> programs_;
};

KeptPrograms& kept_programs() {  // never destroyed: at exit torch is gone before it
  static std::atomic<KeptPrograms* const*> kept{nullptr};
  return *made_once(kept, [] { return new KeptPrograms; });
}

template <class Held>
std::vector<TensorView> views(const std::vector<Held>& held, std::string_view name) {
  std::vector<TensorView> all;
  all.reserve(held.size());
  for (const Held& tensor : held) all.push_back(tensor.view(kRunProgram, name));
  return all;
}

struct RunProgram {
  static constexpr Text schema =
      "run_program_(int[] program, Tensor[] constants, Tensor(a!)[] states, Tensor[] inputs, SymInt[] starts) "
      "-> Tensor";

  // The arguments, with the storage behind the views of `tensors`.
  template <class Given>
  struct Call {
    explicit Call(Given& given)
        : code(integers<"program">(given)), constants(owned<"constants">(given)), states(owned<"states">(given)),
          inputs(owned<"inputs">(given)), starts(integers<"starts">(given)) {
      if (!code.empty() && code[0] == kKept) find();
      else program = std::make_shared<const Program>(code);
      constant_views = kept ? views(kept->constants, "constants") : views(constants, "constants");
      for (auto& state : states) state_views.push_back(state.written_view(kRunProgram, "states"));
      for (auto& input : inputs) input_views.push_back(input.dense_view(kRunProgram, "inputs"));
    }

    void find() {
      check(code.size() >= 2, ErrorKind::value, kRunProgram, ": program must have the number of the one that is kept");
      if (code.size() > 2) {
        program = std::make_shared<const Program>(std::span(code).subspan(2));
        if constexpr (std::is_same_v<Given, Arguments<RunProgram>>)
          kept_programs().put(code[1], std::shared_ptr<KeptProgram>(new KeptProgram{program, std::move(constants)}));
        else return;  // a call that is only described keeps nothing
      } else {
        check(constants.empty(), ErrorKind::value, kRunProgram, ": constants must be none where program is kept, got ",
              constants.size());
      }
      kept = kept_programs().get(code[1]);
      program = kept->program;
    }

    ProgramTensors tensors() const { return {constant_views, state_views, input_views, starts}; }

    std::shared_ptr<const ProgramPlan> plan() const {
      std::shared_ptr<const ProgramPlan> last;
      if (kept) {
        const std::lock_guard lock(kept->mutex);
        last = kept->plan;
      }
      if (last && last->serves(tensors())) return last;
      auto made = std::make_shared<const ProgramPlan>(program, tensors());
      if (kept) {
        const std::lock_guard lock(kept->mutex);
        kept->plan = made;
      }
      return made;
    }

    template <Text name>
    static auto owned(Given& given) {
      auto list = get<name>(given).tensors(given.op);
      return std::vector<typename std::remove_cvref_t<decltype(list)>::value_type>{
          std::make_move_iterator(list.begin()), std::make_move_iterator(list.end())};
    }
    using Tensors = decltype(owned<"states">(std::declval<Given&>()));

    std::vector<int64_t> code;
    Tensors constants, states, inputs;
    std::vector<int64_t> starts;
    std::shared_ptr<KeptProgram> kept;
    std::shared_ptr<const Program> program;
    std::vector<TensorView> constant_views, state_views, input_views;
  };

  template <class Given>
  static std::shared_ptr<const ProgramPlan> args_of(Given& given) { return Call<Given>(given).plan(); }

  static Tensor run(Arguments<RunProgram>& given) {
    Call call(given);
    const std::shared_ptr<const ProgramPlan> plan = call.plan();
    TensorView y = plan->y();
    Tensor result = Tensor::empty(given.op, y);
    if (y.numel() == 0) return result;
    const int64_t bytes = plan->bytes();
    TensorView memory = torch::contiguous_view(y.device, DType::uint8, 1, &bytes);
    const Tensor held = Tensor::empty(given.op, memory);
    plan->run(call.tensors(), memory.as<char>(), y.data);
    return result;
  }
};

}  // namespace

int64_t new_program_number() { return kept_programs().new_number(); }
void forget_program(int64_t number) { kept_programs().forget(number); }

const RegisteredOp run_program_op = registered<RunProgram>();

}  // namespace lowbit::torch
