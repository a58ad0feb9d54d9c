// SPDX-License-Identifier: Apache-2.0
// A hash of everything that the printed text of a program depends on: the key of a compiled program.
#pragma once

#include "score/program.hpp"

namespace lowbit {

class ProgramHash {
 public:
  explicit ProgramHash(const ScoreCall* call) {
    if (!call) return;
    const ScorePlan& plan = call->program().forward;
    add(call->program().is_mask), add(static_cast<int64_t>(plan.steps.size()));
    for (const ScoreStep& step : plan.steps) {
      add(step.op), add(step.type), add(step.immediate), add(step.operand_count), add(step.out);
      for (int i = 0; i < step.operand_count; i++) add(step.operands[i]);
    }
    for (const ScoreConstant& constant : plan.constants) add(constant.type), add(constant.bits);
    for (int i = 0; i < call->captured_count(); i++)
      add(static_cast<int64_t>(call->captured()[i].dtype)), add(call->captured()[i].rank);
  }
  int64_t value() const { return static_cast<int64_t>(state_); }

 private:
  void add(ScoreOperand operand) { add(static_cast<int64_t>(operand.rate)), add(operand.at); }
  void add(int64_t number) {  // the finalizer of splitmix64
    state_ += static_cast<uint64_t>(number) + 0x9e3779b97f4a7c15;
    state_ = (state_ ^ state_ >> 30) * 0xbf58476d1ce4e5b9;
    state_ = (state_ ^ state_ >> 27) * 0x94d049bb133111eb;
    state_ ^= state_ >> 31;
  }
  uint64_t state_ = 0;
};

}  // namespace lowbit
