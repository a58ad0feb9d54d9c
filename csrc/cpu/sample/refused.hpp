// SPDX-License-Identifier: Apache-2.0
// The errors of the numbers in a call of sample, which its row meets. Compiled once, for any machine.
#pragma once

#include "ops/sample.hpp"

namespace lowbit::cpu {

// Number `at` of the ids of `row` is neither a token nor -1.
[[noreturn]] void refuse_id(const SampleArgs& args, int64_t row, int64_t at, int64_t id);
// Row `row` has nan, or its largest logit, which is `most`, is not finite.
[[noreturn]] void refuse_logits(int64_t row, bool has_nan, float most);

}  // namespace lowbit::cpu
