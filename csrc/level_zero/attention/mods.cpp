// SPDX-License-Identifier: Apache-2.0
#include "level_zero/attention/mods.hpp"

#include <array>
#include <map>
#include <mutex>

#include "score/program_hash.hpp"
#include "score/spirv.hpp"

namespace lowbit::level_zero {

std::span<const uint32_t> linked_mods(const ScoreCall* score, const ScoreCall* mask) {
  static std::mutex mutex;
  static std::map<std::array<int64_t, 2>, std::vector<uint32_t>> known;  // for good: programs of drivers are, too
  const std::array key{ProgramHash(score).value(), ProgramHash(mask).value()};
  const std::lock_guard lock(mutex);
  std::vector<uint32_t>& words = known[key];
  if (words.empty()) {
    const ScoreFunction functions[] = {{score, false, "score_mod"}, {mask, false, "mask_mod"}};
    words = score_spirv(functions);
  }
  return words;
}

std::string_view refuses_mod(const ScoreCall* call) {
  if (!call) return "";
  int words = 1;
  for (int i = 0; i < call->captured_count(); i++) words += 2 + 2 * call->captured()[i].rank;
  return words <= TableCall::kMost ? "" : "a mod captures tensors of more than 90 dimensions together";
}

}  // namespace lowbit::level_zero
