// SPDX-License-Identifier: Apache-2.0
// Host code for the mods of attention and decode: as functions that modules import (scores.hpp), and as tables of
// captured tensors for the kernels.
#pragma once

#include <span>

#include "level_zero/attention/call.hpp"
#include "level_zero/runtime/program.hpp"
#include "score/program.hpp"

namespace lowbit::level_zero {

// The mods of one call, at the start of its workspace: the faults of both, set by kernels, then their tables.
class CallMods {
 public:
  static constexpr int64_t kBytes = round_up(kSumsAt + static_cast<int64_t>(sizeof(Sums)), 16);

  // Writes the tables. memory: kBytes of device memory. faults: whether a mod or a block list may fault on the device.
  CallMods(const Place& place, const ScoreCall* score, const ScoreCall* mask, void* memory, bool faults);

  ModTable score() const { return {score_ ? table(0) : nullptr}; }
  ModTable mask() const { return {mask_ ? table(1) : nullptr}; }
  int32_t* fault() const { return fault(0); }  // for block lists, too
  // `module`, or, if there are mods, `with_mods`, linked with them.
  const Program& program(std::string_view module, std::string_view with_mods, Build build = {}) const;
  // The program that accumulates gradients, linked with the mods: `module` has score_add.
  const Program& program_of_sums(std::string_view module) const;
  Sums* sums() const { return reinterpret_cast<Sums*>(static_cast<char*>(memory_) + kSumsAt); }
  // Waits for the kernels, and throws an Error for a fault of a mod or a block list.
  void check_fault(std::string_view op) const;

 private:
  int32_t* fault(int which) const { return static_cast<int32_t*>(memory_) + 4 * which; }
  uint64_t* table(int which) const {
    return reinterpret_cast<uint64_t*>(static_cast<char*>(memory_) + 2 * kFaultBytes + which * kTableBytes);
  }
  void write(const ScoreCall* call, int which) const;

  const Place& place_;
  const ScoreCall *score_, *mask_;
  void* memory_;
  bool faults_;
};

// Why a row refuses a mod, or "".
std::string_view refuses_mod(const ScoreCall* call);

}  // namespace lowbit::level_zero
