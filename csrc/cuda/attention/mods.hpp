// SPDX-License-Identifier: Apache-2.0
// score_mod and mask_mod on the host: their kernel arguments, and their printed text.
#pragma once

#include "cuda/attention/call.hpp"
#include "score/program.hpp"

namespace lowbit::cuda {

CapturedCall captured_of(const ScoreCall* mod);  // for an accepted mod, or null
bool fits(const ScoreCall* mod);
constexpr std::string_view kCapturesTooMuch = "a mod captures more than 16 tensors, or 48 dimensions of all together";

enum class Gradient : uint8_t { none, of_score, of_captured };

// The printed structs, and a struct Mods (mods.cuh) that makes them, with `constants` in addition to its own. The mods
// may be null.
std::string mods_text(const ScoreCall* score, const ScoreCall* mask, Gradient gradient, std::string_view constants);

}  // namespace lowbit::cuda
