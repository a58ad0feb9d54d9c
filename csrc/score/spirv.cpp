// SPDX-License-Identifier: Apache-2.0
#include "score/spirv.hpp"

#include <bit>
#include <map>
#include <utility>

#include "score/spirv_module.hpp"

namespace lowbit {
namespace {

using namespace score;
using spirv::Id;

#define LOWBIT_NAME(name) "score_" #name,
constexpr std::string_view kNames[] = {LOWBIT_SCORE_VALUES(LOWBIT_NAME)};
#undef LOWBIT_NAME

// Writes one function, step by step.
class Writer {
 public:
  Writer(spirv::Module& module, const ScoreFunction& function, bool sums)
      : module_(module), call_(*function.call), captured_(call_.program().graph.captured),
        plan_(function.gradient ? call_.program().backward : call_.program().forward), sums_(sums) {}

  // Returns the result of the function with these parameters.
  Id write(const spirv::Words& parameters, bool gradient) {
    const Id* place = &parameters[gradient ? 2 : 1];
    leaves_ = {{number_of<B>(), place[0]}, {number_of<H>(), place[1]}, {number_of<Q>(), place[2]},
               {number_of<K>(), place[3]}};
    table_ = place[4];
    current_[{Rate::tile, kScoreMemory}] = module_.with_bits_of(parameters[0], 'i');
    if (gradient) current_[{Rate::tile, kGradientMemory}] = module_.with_bits_of(parameters[1], 'i');
    for (const ScoreStep& step : plan_.steps) this->step(step);
    return module_.with_bits_of(current_[{Rate::tile, gradient ? kGradientMemory : kScoreMemory}], 'f');
  }

 private:
  Id number(int64_t value) { return module_.constant('i', static_cast<uint32_t>(value)); }

  Id operand(ScoreOperand place) {
    if (place.rate != Rate::constant) return current_[{place.rate, place.at}];
    const auto [type, bits] = plan_.constants[place.at];
    return number(type == 'f' ? std::bit_cast<uint32_t>(static_cast<float>(std::bit_cast<double>(bits))) : bits);
  }

  Id value(int op, Id a, Id b, Id c) {
    return module_.call(kNames[op - number_of<Copy>()], "iiii", {a, b, c});
  }

  // The offset of an element of a captured tensor, or of its gradient; operands from `first` on are its indices.
  Id element_at(const ScoreStep& step, int first, bool of_gradient) {
    Id at = module_.constant('l', 0);
    const int64_t rank = captured_[step.immediate].rank,
                  sizes = 1 + call_.captured_count() + layout_at(captured_, step.immediate);
    for (int dim = 0; dim < rank; dim++)
      at = module_.call("score_index", "lpiiiili",
                        {table_, number(sizes + dim), number(of_gradient ? 0 : sizes + rank + dim),
                         number(step.immediate), number(dim), at, operand(step.operands[first + dim])});
    return at;
  }

  Id result_of(const ScoreStep& step) {
    const Id zero = number(0);
    if (const auto leaf = leaves_.find(step.op); leaf != leaves_.end()) return leaf->second;
    if (step.op == number_of<KMinusQ>())
      return value(number_of<SubInt>(), leaves_[number_of<K>()], leaves_[number_of<Q>()], zero);
    if (step.op == number_of<Sum>()) return operand(step.operands[0]);  // each score adds its share
    if (step.op == number_of<score::Gather>())
      return module_.call("score_element", "ipiil",
                          {table_, number(step.immediate),
                           number(static_cast<int64_t>(call_.captured()[step.immediate].dtype)),
                           element_at(step, 0, false)});
    Id in[3] = {zero, zero, zero};
    for (int i = 0; i < step.operand_count; i++) in[i] = operand(step.operands[i]);
    if (divides_ints(step.op)) module_.call("score_check_divisor", "vpi", {table_, in[1]});
    return value(step.op, in[0], in[1], in[2]);
  }

  void step(const ScoreStep& step) {
    if (step.op != number_of<ScatterAdd>()) {
      current_[{step.out.rate, step.out.at}] = result_of(step);
    } else if (sums_) {
      const Id at = element_at(step, 1, true), value = operand(step.operands[0]);
      module_.call("score_add", "vpili", {table_, number(step.immediate), at, value});
    }
  }

  spirv::Module& module_;
  const ScoreCall& call_;
  const std::vector<CapturedType>& captured_;
  const ScorePlan& plan_;
  bool sums_;
  std::map<int, Id> leaves_;
  Id table_ = 0;
  std::map<std::pair<Rate, int32_t>, Id> current_;  // the value that a register of the plan currently holds
};

}  // namespace

std::vector<uint32_t> score_spirv(std::span<const ScoreFunction> functions, bool sums) {
  spirv::Module module;
  for (const ScoreFunction& function : functions) {
    const spirv::Words parameters = module.begin_function(function.name, function.gradient ? "fffiiiip" : "ffiiiip");
    const Id same = parameters[function.gradient ? 1 : 0];
    module.end_function(function.call ? Writer(module, function, sums).write(parameters, function.gradient) : same);
  }
  return module.words();
}

std::vector<uint64_t> score_table(const ScoreCall& call, const int32_t* fault) {
  const std::span captured(call.captured(), static_cast<std::size_t>(call.captured_count()));
  std::vector<uint64_t> table{reinterpret_cast<uintptr_t>(fault)};
  for (const TensorView& tensor : captured) table.push_back(reinterpret_cast<uintptr_t>(tensor.data));
  for (const TensorView& tensor : captured) {
    for (int d = 0; d < tensor.rank; d++) table.push_back(static_cast<uint64_t>(tensor.shape[d]));
    for (int d = 0; d < tensor.rank; d++) table.push_back(static_cast<uint64_t>(tensor.stride[d]));
  }
  return table;
}

}  // namespace lowbit
