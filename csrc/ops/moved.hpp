// SPDX-License-Identifier: Apache-2.0
// The bytes moved by a conversion between values and codes with scales.
#pragma once

#include "recorder/call.hpp"

namespace lowbit {

inline Call encoding(const TensorView& values, const TensorView& codes, const TensorView& scale) {
  return Call{.read = bytes_of(values), .written = bytes_of(codes) + bytes_of(scale)}.with(values, codes);
}

inline Call decoding(const TensorView& codes, const TensorView& scale, const TensorView& values) {
  return Call{.read = bytes_of(codes) + bytes_of(scale), .written = bytes_of(values)}.with(codes, values);
}

}  // namespace lowbit
