// SPDX-License-Identifier: Apache-2.0
// The forms of linear's activations, and its epilogue's activation functions. No std: device sources include it.
#pragma once

#include "formats/list.hpp"

namespace lowbit {

// The form of activations in the product. int8 codes are within +-127, with one scale per row and weight group (group)
// or per row (row). float8: rounded to e4m3 with one scale per row, and multiplied as floats.
enum class XFormat : int { floating, int8_group, int8_row, int8_row_asymmetric, float8_row };
inline constexpr std::string_view kXFormatNames[] = {"float", "int8_group", "int8_row", "int8_row_asymmetric",
                                                     "float8_row"};

// Whether activations enter the product as floats.
constexpr bool stays_float(XFormat activations) {
  return activations == XFormat::floating || activations == XFormat::float8_row;
}

// Whether a weight of this format accepts such activations: int8 needs integers, as codes or as levels, float8 needs
// float8.
constexpr bool goes_with(XFormat activations, Format weight) {
  switch (activations) {
    case XFormat::floating: return true;
    case XFormat::float8_row: return weight == Format::fp8_e4m3;
    default: return has_integer_values(weight);
  }
}

enum class Activation : int { none, relu, gelu, gelu_tanh, silu };
inline constexpr std::string_view kActivationNames[] = {"none", "relu", "gelu", "gelu_tanh", "silu"};

}  // namespace lowbit
