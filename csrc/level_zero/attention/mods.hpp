// SPDX-License-Identifier: Apache-2.0
// On the host: the mods of a call of attention or decode, as modules import them (scores.hpp) and as kernels find what
// they captured.
#pragma once

#include <span>

#include "level_zero/attention/call.hpp"
#include "score/program.hpp"

namespace lowbit::level_zero {

// score_mod and mask_mod as SPIR-V (score/spirv.hpp), kept.
std::span<const uint32_t> linked_mods(const ScoreCall* score, const ScoreCall* mask);

// "" or why a row does not take a mod.
std::string_view refuses_mod(const ScoreCall* call);

// The part of a workspace that tables need, at its begin: the fault, then the tables of both.
constexpr int64_t kFaultBytes = 16, kTableBytes = TableCall::kMost * 8, kModBytes = kFaultBytes + 2 * kTableBytes;

}  // namespace lowbit::level_zero
