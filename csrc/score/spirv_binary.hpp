// SPDX-License-Identifier: Apache-2.0
// C's operators of two operands: how they bind, and their instructions.
#pragma once

#include <algorithm>
#include <string_view>

#include "score/spirv_module.hpp"

namespace lowbit::spirv {

struct Binary {
  std::string_view sign;
  int precedence;
  Op of_float, of_signed, of_unsigned;
  bool compares = false;
};
inline constexpr Binary kBinary[] = {
    {"||", 1, Op::logical_or, Op::logical_or, Op::logical_or, true},
    {"&&", 2, Op::logical_and, Op::logical_and, Op::logical_and, true},
    {"|", 3, Op{}, Op::bitwise_or, Op::bitwise_or},
    {"^", 4, Op{}, Op::bitwise_xor, Op::bitwise_xor},
    {"&", 5, Op{}, Op::bitwise_and, Op::bitwise_and},
    {"==", 6, Op::f_ord_equal, Op::i_equal, Op::i_equal, true},
    {"!=", 6, Op::f_unord_not_equal, Op::i_not_equal, Op::i_not_equal, true},
    {"<", 7, Op::f_ord_less_than, Op::s_less_than, Op::u_less_than, true},
    {">", 7, Op::f_ord_greater_than, Op::s_greater_than, Op::u_greater_than, true},
    {"<=", 7, Op::f_ord_less_than_equal, Op::s_less_than_equal, Op::u_less_than_equal, true},
    {">=", 7, Op::f_ord_greater_than_equal, Op::s_greater_than_equal, Op::u_greater_than_equal, true},
    {"<<", 8, Op{}, Op::shift_left_logical, Op::shift_left_logical},
    {">>", 8, Op{}, Op::shift_right_arithmetic, Op::shift_right_logical},
    {"+", 9, Op::f_add, Op::i_add, Op::i_add},
    {"-", 9, Op::f_sub, Op::i_sub, Op::i_sub},
    {"*", 10, Op::f_mul, Op::i_mul, Op::i_mul},
    {"/", 10, Op::f_div, Op::s_div, Op::u_div},
    {"%", 10, Op{}, Op::s_rem, Op::u_mod},
};

inline const Binary* binary_of(std::string_view sign) {
  const auto* found = std::ranges::find(kBinary, sign, &Binary::sign);
  return found == std::end(kBinary) ? nullptr : found;
}

}  // namespace lowbit::spirv
