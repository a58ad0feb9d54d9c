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

// The codes of an int8 weight as signed rows [panels * 16, padded k], and the scale of each.
void rows_of_panels(const WeightSpec& spec, const uint8_t* weight, int8_t* rows, float* column_scale);

}  // namespace lowbit::onednn
