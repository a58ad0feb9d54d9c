// SPDX-License-Identifier: Apache-2.0
// The bytes that a call moves between values and codes with scales.
#pragma once

#include "recorder/call.hpp"

namespace lowbit {

inline Call encoding(const TensorView& values, const TensorView& codes, const TensorView& scale) {
  Call call{.read = bytes_of(values), .written = bytes_of(codes) + bytes_of(scale)};
  call.add(values), call.add(codes);
  return call;
}

inline Call decoding(const TensorView& codes, const TensorView& scale, const TensorView& values) {
  Call call{.read = bytes_of(codes) + bytes_of(scale), .written = bytes_of(values)};
  call.add(codes), call.add(values);
  return call;
}

}  // namespace lowbit
