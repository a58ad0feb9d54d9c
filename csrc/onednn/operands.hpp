// SPDX-License-Identifier: Apache-2.0
// Activations and packed weights in the forms that oneDNN multiplies.
#pragma once

#include "ops/linear.hpp"

namespace lowbit::onednn {

// Below this many elements a parallel region costs more than it saves.
int threads_for(int64_t elements);

// `count` values as float32, with zeros behind them up to `padded`.
void widen(const char* values, DType dtype, int64_t count, int64_t padded, float* out);

// The int8 codes of x, [m, padded k], and the scale of each row: as csrc/cpu/linear/activations.hpp makes them.
void quantize_rows(const LinearArgs& args, int8_t* codes, float* row_scale);

// The codes of a symmetric int8 or int4 weight as signed rows [panels * 16, k], k with padding or more.
void rows_of_panels(const WeightSpec& spec, const uint8_t* weight, int64_t k, int8_t* rows);

// A bfloat16 or float16 weight as [padded k, panels * 16].
void rows_of_k(const WeightSpec& spec, const uint8_t* weight, uint16_t* rows);

// What a code is multiplied by: [groups, n]; 0 in groups that are padding alone.
void scales_of_panels(const WeightSpec& spec, const uint8_t* weight, int64_t groups, float* scales);

}  // namespace lowbit::onednn
