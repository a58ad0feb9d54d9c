// SPDX-License-Identifier: Apache-2.0
// Errors of sample that depend on the data, raised by its row. Compiled once, for all machines.
#pragma once

#include "ops/sample.hpp"

namespace lowbit::cpu {

// Id `at` of `row` is neither a token nor -1.
[[noreturn]] void refuse_id(const SampleArgs& args, int64_t row, int64_t at, int64_t id);
// Row `row` contains nan, or its largest logit, `most`, is not finite.
[[noreturn]] void refuse_logits(int64_t row, bool has_nan, float most);

}  // namespace lowbit::cpu
