// SPDX-License-Identifier: Apache-2.0
#include "level_zero/attention/mods.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>

#include "level_zero/runtime/memory.hpp"
#include "score/program_hash.hpp"
#include "score/spirv.hpp"

namespace lowbit::level_zero {
namespace {

// score_mod, its gradient and mask_mod as SPIR-V, never freed, like the device's programs.
std::span<const uint32_t> words_of(const ScoreCall* score, const ScoreCall* mask, bool sums) {
  static std::mutex mutex;
  static std::map<std::array<int64_t, 3>, std::vector<uint32_t>> known;
  const std::array key{ProgramHash(score).value(), ProgramHash(mask).value(), int64_t{sums}};
  const std::lock_guard lock(mutex);
  std::vector<uint32_t>& words = known[key];
  if (words.empty()) {
    const ScoreFunction functions[] = {
        {score, false, "score_mod"}, {score, true, "score_mod_gradient"}, {mask, false, "mask_mod"}};
    words = score_spirv(functions, sums);
  }
  return words;
}

// Whether a fault can be that of a mod. A device that computes nothing (Intel's driver without a GPU)
// leaves memory unchanged.
bool may_be_noted(const ScoreCall& call, const int32_t (&noted)[4]) {
  const auto [seen, tensor, dim, index] = noted;
  if (seen != 1) return false;
  if (tensor == ScoreFault::kDivision) return true;
  return tensor >= 0 && tensor < call.captured_count() && dim >= 0 && dim < call.captured()[tensor].rank;
}

}  // namespace

CallMods::CallMods(const Place& place, const ScoreCall* score, const ScoreCall* mask, void* memory, bool faults)
    : place_(place), score_(score), mask_(mask), memory_(memory), faults_(faults) {
  if (!faults_) return;
  write(score, 0), write(mask, 1);
}

void CallMods::write(const ScoreCall* call, int which) const {
  TableCall args{.fault = fault(which), .table = table(which), .words = {}};
  if (call) std::ranges::copy(score_table(*call, fault(which)), args.words);
  level_zero::program(place_, "attention_prepare")
      .launch(place_, "write_table", 1, kAttentionThreads, &args, sizeof args);
}

const Program& CallMods::program_of_sums(std::string_view module) const {
  return level_zero::program(place_, module, {.mods = words_of(score_, mask_, true)});
}

const Program& CallMods::program(std::string_view module, std::string_view with_mods,
                                 Build build) const {
  if (!score_ && !mask_) return level_zero::program(place_, module, build);
  build.mods = words_of(score_, mask_, false);
  return level_zero::program(place_, with_mods, build);
}

void CallMods::check_fault(std::string_view op) const {
  if (!faults_) return;
  int32_t noted[2][4] = {};
  copy(place_.device, noted, memory_, sizeof noted);
  check(!noted[0][0] || noted[0][1] != kBlockListFault, ErrorKind::value,
        op, ": kv_num_blocks or kv_indices, or those of full blocks, have numbers that are out of range");
  for (int which = 0; which < 2; which++) {
    const ScoreCall* call = which ? mask_ : score_;
    if (!call || !noted[which][0]) continue;
    check(may_be_noted(*call, noted[which]), ErrorKind::runtime, op, ": the device noted a fault that no mod can "
          "have: it failed, or a kernel did not run");
    ScoreFault& fault = call->fault();
    fault.tensor = noted[which][1], fault.dim = noted[which][2], fault.index = noted[which][3], fault.seen = true;
    call->check_fault();
  }
}

std::string_view refuses_mod(const ScoreCall* call) {
  if (!call) return "";
  int words = 1;
  for (int i = 0; i < call->captured_count(); i++) words += 1 + 2 * call->captured()[i].rank;
  return words <= TableCall::kMax ? "" : "a mod captures tensors with more than 127 addresses, sizes and strides";
}

}  // namespace lowbit::level_zero
