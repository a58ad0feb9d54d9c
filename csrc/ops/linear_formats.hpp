// SPDX-License-Identifier: Apache-2.0
// How activations enter linear, and what happens to its sums. No std: source text of devices includes it.
#pragma once

#include "formats/list.hpp"

namespace lowbit {

// How activations enter the product. int8 codes are within +-127; group: one scale per row and weight group; row: one
// per row. float8: rounded to e4m3 times the scale of their row, and multiplied as floats.
enum class XFormat : int { floating, int8_group, int8_row, int8_row_asymmetric, float8_row };
inline constexpr std::string_view kXFormatNames[] = {"float", "int8_group", "int8_row", "int8_row_asymmetric",
                                                     "float8_row"};

// Whether activations enter the product as floats.
constexpr bool stays_float(XFormat activations) {
  return activations == XFormat::floating || activations == XFormat::float8_row;
}

// Whether a weight of this format is multiplied by such activations: int8 by integers, float8 by float8.
constexpr bool goes_with(XFormat activations, Format weight) {
  switch (activations) {
    case XFormat::floating: return true;
    case XFormat::float8_row: return weight == Format::fp8_e4m3;
    default: return is_integer(weight);
  }
}

enum class Activation : int { none, relu, gelu, gelu_tanh, silu };
inline constexpr std::string_view kActivationNames[] = {"none", "relu", "gelu", "gelu_tanh", "silu"};

}  // namespace lowbit
