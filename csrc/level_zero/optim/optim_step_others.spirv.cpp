// SPDX-License-Identifier: Apache-2.0
// Steps that few ask for: amsgrad, <rule>_<moments>_<format>, and SGD without momentum, which has no states.
#include "level_zero/optim/step.hpp"

LOWBIT_STEP(adamw_3_float32, AdamW::Step<3>, float32, 256)
LOWBIT_STEP(adamw_3_bfloat16, AdamW::Step<3>, bfloat16, 256)
LOWBIT_STEP(adamw_3_dynamic8, AdamW::Step<3>, dynamic8, lowbit::level_zero::kCodesBlock)
LOWBIT_STEP(adamw_3_dynamic4, AdamW::Step<3>, dynamic4, lowbit::level_zero::kNibblesBlock)
LOWBIT_STEP(adamw_3_float8, AdamW::Step<3>, float8, lowbit::level_zero::kCodesBlock)
LOWBIT_STEP(sgd_0, Sgd::Step<0>, float32, 256)
