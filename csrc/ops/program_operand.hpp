// SPDX-License-Identifier: Apache-2.0
// What a step of a program (program.hpp) reads and writes.
#pragma once

#include <cstdint>

namespace lowbit {

struct Operand {
  enum class Kind : int8_t { constant, state, input, result, none };
  Kind kind = Kind::none;
  int32_t index = 0;

  explicit operator bool() const { return kind != Kind::none; }
};

}  // namespace lowbit
