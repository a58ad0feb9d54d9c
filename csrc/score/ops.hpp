// SPDX-License-Identifier: Apache-2.0
// The ops of a score program: name, operands, result, and derivative of each. One struct per op, one entry in the
// list at the end: parser, vector machine, reverse mode, interval analysis and Python's `_C.SCORE_OPS` follow
// from these alone.
//
//   types       operands > result: f float, i int, b bool
//   value       of one element of operands a, b, c. Float is float or double, Int the int32_t or int64_t of that size;
//   a
//               bool is an Int, 0 or 1. Written in the common subset of C++, CUDA C and OpenCL C, with the
//               functions of math.hpp: printed programs contain its text (score/print.cpp), and the build compiles it
//               for Intel GPUs (the module score_ops)
//   derivative  of the result with respect to each float operand, in terms of the operands and the result y; E is an
//               expression that records further ops (score/reverse.cpp). Without one the gradient stops here
//               (torch: zero)
//   interval    bounds of the result for operands anywhere in these intervals; without it, unbounded
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string_view>

#include "score/math.hpp"

namespace lowbit {

// Closed; a bool is within 0..1. Ends are attained or lie outside: never too narrow.
struct Interval {
  double low = -std::numeric_limits<double>::infinity(), high = std::numeric_limits<double>::infinity();
  bool is_point() const { return low == high; }
  bool is_anything() const { return *this == Interval{}; }  // for floats: nan too
  friend bool operator==(const Interval&, const Interval&) = default;
};

inline Interval truth(bool can_be_false, bool can_be_true) {
  return {can_be_false ? 0.0 : 1.0, can_be_true ? 1.0 : 0.0};
}
template <class Function>
Interval over_corners(Interval a, Interval b, Function&& function) {  // for a function that is monotone in each operand
  const double v[] = {function(a.low, b.low), function(a.low, b.high), function(a.high, b.low),
                      function(a.high, b.high)};
  for (double corner : v)
    if (!(std::fabs(corner) <= std::numeric_limits<double>::max())) return {};  // inf - inf and the like
  return {std::min(std::min(v[0], v[1]), std::min(v[2], v[3])), std::max(std::max(v[0], v[1]), std::max(v[2], v[3]))};
}

namespace score {

#define LOWBIT_OP(op_name, op_types) static constexpr std::string_view name = op_name, types = op_types
#define LOWBIT_VALUE(parameters, expression)                        \
  LOWBIT_INLINE static auto value parameters { return expression; } \
  static constexpr std::string_view text = #expression
#define LOWBIT_VALUE1(expression) template <class A> LOWBIT_VALUE((A a), expression);
#define LOWBIT_VALUE2(expression) template <class A> LOWBIT_VALUE((A a, A b), expression);
#define LOWBIT_VALUE3(expression) template <class A, class B> LOWBIT_VALUE((A a, B b, B c), expression);
#define LOWBIT_DERIVATIVE1(expression)                              \
  template <class E>                                                \
  static E derivative([[maybe_unused]] E a, [[maybe_unused]] E y) { \
    return expression;                                              \
  }
#define LOWBIT_DERIVATIVE2(da, db)                                                                       \
  template <class E>                                                                                     \
  static std::array<E, 2> derivative([[maybe_unused]] E a, [[maybe_unused]] E b, [[maybe_unused]] E y) { \
    return {da, db};                                                                                     \
  }
#define LOWBIT_RISING(function)                                  \
  static Interval interval(Interval a) {                         \
    const double low = function(a.low), high = function(a.high); \
    return {low, high};                                          \
  }

// Leaves have no value of their own: the program or the tile provides it.
struct Score { LOWBIT_OP("score", ">f"); };  // scale * q . k
struct B { LOWBIT_OP("b", ">i"); };
struct H { LOWBIT_OP("h", ">i"); };          // query head, also under GQA
struct Q { LOWBIT_OP("q", ">i"); };
struct K { LOWBIT_OP("k", ">i"); };
struct FloatConst { LOWBIT_OP("float_const", ">f"); };  // followed by the bits of a float64
struct IntConst { LOWBIT_OP("int_const", ">i"); };      // followed by the value
struct BoolConst { LOWBIT_OP("bool_const", ">b"); };    // followed by 0 or 1
struct Gather {
  LOWBIT_OP("gather", ">?");
};  // followed by the number of the captured tensor and one int per dimension

// Created by the passes, never part of a code.
struct Gradient { LOWBIT_OP("gradient", ">f"); };           // gradient of the loss with respect to the modified score
struct KMinusQ { LOWBIT_OP("k_minus_q", ">i"); };           // index of the diagonal
struct ScatterAdd { LOWBIT_OP("scatter_add", "f>?"); };     // adds to the gradient of a captured tensor
struct Sum { LOWBIT_OP("sum", "f>f"); };                    // sum over the axes that the result does not depend on
struct Copy { LOWBIT_OP("copy", "f>f"); LOWBIT_VALUE1(a) };
struct MultiplyAdd { LOWBIT_OP("multiply_add", "fff>f"); LOWBIT_VALUE3(fma_of(a, b, c)) };
struct ScaledTanh { LOWBIT_OP("scaled_tanh", "fff>f"); LOWBIT_VALUE3(mul_of(tanh_of(mul_of(a, b)), c)) };

// Float
struct Add { LOWBIT_OP("add", "ff>f");
  LOWBIT_VALUE2(add_of(a, b)) LOWBIT_DERIVATIVE2(1.0, 1.0) static Interval interval(Interval a, Interval b) {
    return over_corners(a, b, [](double x, double y) { return x + y; });
  }
};
struct Sub { LOWBIT_OP("sub", "ff>f");
  LOWBIT_VALUE2(sub_of(a, b)) LOWBIT_DERIVATIVE2(1.0, -1.0) static Interval interval(Interval a, Interval b) {
    return over_corners(a, b, [](double x, double y) { return x - y; });
  }
};
struct Mul { LOWBIT_OP("mul", "ff>f");
  LOWBIT_VALUE2(mul_of(a, b)) LOWBIT_DERIVATIVE2(b, a) static Interval interval(Interval a, Interval b) {
    return over_corners(a, b, [](double x, double y) { return x * y; });
  }
};
struct Div { LOWBIT_OP("div", "ff>f"); LOWBIT_VALUE2(div_of(a, b)) LOWBIT_DERIVATIVE2(1.0 / b, -y / b)
  static Interval interval(Interval a, Interval b) {
    return b.low <= 0 && b.high >= 0 ? Interval{} : over_corners(a, b, [](double x, double y) { return x / y; });
  } };
// In a tie each side gets half of the gradient, as in torch; with nan both get all of it.
struct Maximum {
  LOWBIT_OP("maximum", "ff>f");
  LOWBIT_VALUE2(a > b || a != a ? a : b)
  LOWBIT_DERIVATIVE2(share(a < b, equal(a, b)), share(b < a, equal(a, b))) template <class E>
  static E share(E lost, E tie) {
    return where(lost, E(0.0), where(tie, E(0.5), E(1.0)));
  }
  static Interval interval(Interval a, Interval b) {
    return a.is_anything() || b.is_anything() ? Interval{} : Interval{std::max(a.low, b.low), std::max(a.high, b.high)};
  }
};
struct Minimum {
  LOWBIT_OP("minimum", "ff>f");
  LOWBIT_VALUE2(a < b || a != a ? a : b)
  LOWBIT_DERIVATIVE2(Maximum::share(b < a, equal(a, b)), Maximum::share(a < b, equal(a, b))) static Interval
      interval(Interval a, Interval b) {
    return a.is_anything() || b.is_anything() ? Interval{} : Interval{std::min(a.low, b.low), std::min(a.high, b.high)};
  }
};
struct FloorDivide;
struct Trunc;
struct Remainder {
  LOWBIT_OP("remainder", "ff>f");
  LOWBIT_VALUE2(remainder_of(a, b)) LOWBIT_DERIVATIVE2(1.0, -call<FloorDivide>(a, b))
};  // sign of b
struct Fmod {
  LOWBIT_OP("fmod", "ff>f");
  LOWBIT_VALUE2(fmod_of(a, b)) LOWBIT_DERIVATIVE2(1.0, -call<Trunc>(a / b))
};  // sign of a
struct FloorDivide { LOWBIT_OP("floor_divide", "ff>f"); LOWBIT_VALUE2(floor_divide_of(a, b)) };
struct Log;
struct And;
struct LessEqual;
struct Pow {
  LOWBIT_OP("pow", "ff>f");
  LOWBIT_VALUE2(pow_of(a, b))
  LOWBIT_DERIVATIVE2(where(equal(b, E(0.0)), E(0.0), b* call<Pow>(a, b - E(1.0))),
                     where(call<And>(equal(a, E(0.0)), call<LessEqual>(E(0.0), b)), E(0.0), y* call<Log>(a)))
};

struct Neg { LOWBIT_OP("neg", "f>f"); LOWBIT_VALUE1(-a) LOWBIT_DERIVATIVE1(-1.0)
  static Interval interval(Interval a) { return {-a.high, -a.low}; } };
struct Sign {
  LOWBIT_OP("sign", "f>f");
  LOWBIT_VALUE1((a > 0) - (a < 0)) LOWBIT_RISING(value)
};
struct Abs { LOWBIT_OP("abs", "f>f"); LOWBIT_VALUE1(a < 0 ? -a : a + 0) LOWBIT_DERIVATIVE1(call<Sign>(a))
  static Interval interval(Interval a) {
    if (a.is_anything()) return {};
    const double low = std::fabs(a.low), high = std::fabs(a.high);
    return {a.low <= 0 && a.high >= 0 ? 0.0 : std::min(low, high), std::max(low, high)};
  } };
struct Floor { LOWBIT_OP("floor", "f>f"); LOWBIT_VALUE1(floor_of(a)) LOWBIT_RISING(value) };
struct Ceil { LOWBIT_OP("ceil", "f>f"); LOWBIT_VALUE1(-floor_of(-a)) LOWBIT_RISING(value) };
struct Trunc { LOWBIT_OP("trunc", "f>f"); LOWBIT_VALUE1(a < 0 ? -floor_of(-a) : floor_of(a)) LOWBIT_RISING(value) };
struct Round { LOWBIT_OP("round", "f>f"); LOWBIT_VALUE1(round_of(a)) LOWBIT_RISING(value) };  // half to even
struct Sqrt { LOWBIT_OP("sqrt", "f>f"); LOWBIT_VALUE1(sqrt_of(a)) LOWBIT_DERIVATIVE1(0.5 / y) };
struct Rsqrt { LOWBIT_OP("rsqrt", "f>f"); LOWBIT_VALUE1(div_of(1, sqrt_of(a))) LOWBIT_DERIVATIVE1(-0.5 * y * y * y) };
struct Exp { LOWBIT_OP("exp", "f>f"); LOWBIT_VALUE1(exp_of(a)) LOWBIT_DERIVATIVE1(y) };
struct Exp2 { LOWBIT_OP("exp2", "f>f"); LOWBIT_VALUE1(exp2_of(a)) LOWBIT_DERIVATIVE1(y * 0.69314718055994531) };
struct Expm1 { LOWBIT_OP("expm1", "f>f"); LOWBIT_VALUE1(expm1_of(a)) LOWBIT_DERIVATIVE1(y + 1.0) };
struct Log { LOWBIT_OP("log", "f>f"); LOWBIT_VALUE1(log_of(a)) LOWBIT_DERIVATIVE1(1.0 / a) };
struct Log2 { LOWBIT_OP("log2", "f>f"); LOWBIT_VALUE1(log2_of(a)) LOWBIT_DERIVATIVE1(1.4426950408889634 / a) };
struct Log1p { LOWBIT_OP("log1p", "f>f"); LOWBIT_VALUE1(log1p_of(a)) LOWBIT_DERIVATIVE1(1.0 / (a + 1.0)) };
struct Cos;
struct Sin { LOWBIT_OP("sin", "f>f"); LOWBIT_VALUE1(sin_of(a)) LOWBIT_DERIVATIVE1(call<Cos>(a)) };
struct Cos { LOWBIT_OP("cos", "f>f"); LOWBIT_VALUE1(cos_of(a)) LOWBIT_DERIVATIVE1(-call<Sin>(a)) };
struct Tan { LOWBIT_OP("tan", "f>f"); LOWBIT_VALUE1(tan_of(a)) LOWBIT_DERIVATIVE1(y * y + 1.0) };
struct Atan { LOWBIT_OP("atan", "f>f"); LOWBIT_VALUE1(atan_of(a)) LOWBIT_DERIVATIVE1(1.0 / (a * a + 1.0)) };
struct Tanh { LOWBIT_OP("tanh", "f>f"); LOWBIT_VALUE1(tanh_of(a)) LOWBIT_DERIVATIVE1(1.0 - y * y) };
struct Sigmoid {
  LOWBIT_OP("sigmoid", "f>f");
  LOWBIT_VALUE1(div_of(1, add_of(1, exp_of(-a)))) LOWBIT_DERIVATIVE1(y * (1.0 - y))
};
struct Erf {
  LOWBIT_OP("erf", "f>f");
  LOWBIT_VALUE1(erf_of(a)) LOWBIT_DERIVATIVE1(1.1283791670955126 * call<Exp>(-(a * a)))
};
// Rounded to a 16-bit float, as if stored in a tensor of that dtype.
struct ToBfloat16 { LOWBIT_OP("to_bfloat16", "f>f"); LOWBIT_VALUE1(rounded_to_bfloat16(a)) LOWBIT_DERIVATIVE1(1.0) };
struct ToFloat16 { LOWBIT_OP("to_float16", "f>f"); LOWBIT_VALUE1(rounded_to_float16(a)) LOWBIT_DERIVATIVE1(1.0) };

// Int: wraps. Division rounds down and the remainder has the sign of b (Python), or they round to zero (C).
struct AddInt : Add { LOWBIT_OP("add_int", "ii>i"); LOWBIT_VALUE2(wrapped(bits_of(a) + bits_of(b))) };
struct SubInt : Sub { LOWBIT_OP("sub_int", "ii>i"); LOWBIT_VALUE2(wrapped(bits_of(a) - bits_of(b))) };
struct MulInt : Mul { LOWBIT_OP("mul_int", "ii>i"); LOWBIT_VALUE2(wrapped(bits_of(a) * bits_of(b))) };
struct FloorDivideInt { LOWBIT_OP("floor_divide_int", "ii>i"); LOWBIT_VALUE2(floor_divide_int(a, b))
  static Interval interval(Interval a, Interval b) {
    return b.low <= 0 && b.high >= 0 ? Interval{}
                                     : over_corners(a, b, [](double x, double y) { return std::floor(x / y); });
  } };
struct RemainderInt { LOWBIT_OP("remainder_int", "ii>i"); LOWBIT_VALUE2(remainder_int(a, b))
  static Interval interval(Interval a, Interval b) {
    if (!b.is_point() || b.low == 0) return {};
    const double low = std::floor(a.low / b.low), high = std::floor(a.high / b.low);
    if (low == high)
      return {std::min(a.low - low * b.low, a.high - low * b.low), std::max(a.low - low * b.low, a.high - low * b.low)};
    return b.low > 0 ? Interval{0, b.low - 1} : Interval{b.low + 1, 0};
  } };
struct TruncDivideInt { LOWBIT_OP("trunc_divide_int", "ii>i"); LOWBIT_VALUE2(trunc_divide_int(a, b)) };
struct FmodInt {
  LOWBIT_OP("fmod_int", "ii>i");
  LOWBIT_VALUE2(wrapped(bits_of(a) - bits_of(b) * bits_of(trunc_divide_int(a, b))))
};
struct MaximumInt : Maximum { LOWBIT_OP("maximum_int", "ii>i"); LOWBIT_VALUE2(a > b ? a : b) };
struct MinimumInt : Minimum { LOWBIT_OP("minimum_int", "ii>i"); LOWBIT_VALUE2(a < b ? a : b) };
struct NegInt : Neg { LOWBIT_OP("neg_int", "i>i"); LOWBIT_VALUE1(wrapped(-bits_of(a))) };
struct AbsInt : Abs { LOWBIT_OP("abs_int", "i>i"); LOWBIT_VALUE1(a < 0 ? wrapped(-bits_of(a)) : a) };
struct SignInt {
  LOWBIT_OP("sign_int", "i>i");
  LOWBIT_VALUE1((a > 0) - (a < 0)) LOWBIT_RISING(value)
};
struct AndInt { LOWBIT_OP("and_int", "ii>i"); LOWBIT_VALUE2(a & b)
  static Interval interval(Interval a, Interval b) {
    return a.low >= 0 && b.low >= 0 ? Interval{0, std::min(a.high, b.high)} : Interval{};
  }
};
struct OrInt { LOWBIT_OP("or_int", "ii>i"); LOWBIT_VALUE2(a | b) };
struct XorInt { LOWBIT_OP("xor_int", "ii>i"); LOWBIT_VALUE2(a ^ b) };
struct NotInt { LOWBIT_OP("not_int", "i>i"); LOWBIT_VALUE1(~a)
  static Interval interval(Interval a) { return {-1 - a.high, -1 - a.low}; } };
struct ShiftLeft { LOWBIT_OP("shift_left", "ii>i"); LOWBIT_VALUE2(shifted_left(a, b)) };
struct ShiftRight { LOWBIT_OP("shift_right", "ii>i"); LOWBIT_VALUE2(shifted_right(a, b))
  static Interval interval(Interval a, Interval b) {
    const auto shift = [](double x, double y) { return std::floor(std::ldexp(x, -static_cast<int>(y))); };
    return b.is_point() && b.low >= 0 && b.low < 31 ? over_corners(a, b, shift) : Interval{};
  } };

// Comparisons; a > b is b < a.
struct Less { LOWBIT_OP("lt", "ff>b"); LOWBIT_VALUE2(a < b)
  static Interval interval(Interval a, Interval b) { return truth(!(a.high < b.low), a.low < b.high); } };
struct LessEqual { LOWBIT_OP("le", "ff>b"); LOWBIT_VALUE2(a <= b)
  static Interval interval(Interval a, Interval b) {
    return truth(!(a.high <= b.low) || a.is_anything() || b.is_anything(), a.low <= b.high);
  }
};
struct Equal { LOWBIT_OP("eq", "ff>b"); LOWBIT_VALUE2(a == b)
  static Interval interval(Interval a, Interval b) {
    return truth(!(a.is_point() && a == b), a.low <= b.high && b.low <= a.high);
  }
};
struct NotEqual { LOWBIT_OP("ne", "ff>b"); LOWBIT_VALUE2(a != b)
  static Interval interval(Interval a, Interval b) {
    return truth(a.low <= b.high && b.low <= a.high, !(a.is_point() && a == b));
  }
};
struct LessInt : Less { LOWBIT_OP("lt_int", "ii>b"); };
struct LessEqualInt : LessEqual { LOWBIT_OP("le_int", "ii>b"); };
struct EqualInt : Equal { LOWBIT_OP("eq_int", "ii>b"); };
struct NotEqualInt : NotEqual { LOWBIT_OP("ne_int", "ii>b"); };

// Bool
struct And { LOWBIT_OP("and", "bb>b"); LOWBIT_VALUE2(a & b)
  static Interval interval(Interval a, Interval b) { return {std::min(a.low, b.low), std::min(a.high, b.high)}; } };
struct Or { LOWBIT_OP("or", "bb>b"); LOWBIT_VALUE2(a | b)
  static Interval interval(Interval a, Interval b) { return {std::max(a.low, b.low), std::max(a.high, b.high)}; } };
struct Xor { LOWBIT_OP("xor", "bb>b"); LOWBIT_VALUE2(a ^ b)
  static Interval interval(Interval a, Interval b) {
    return a.is_point() && b.is_point() ? truth(a == b, !(a == b)) : truth(true, true);
  }
};
struct Not { LOWBIT_OP("not", "b>b"); LOWBIT_VALUE1(a ^ 1)
  static Interval interval(Interval a) { return {1 - a.high, 1 - a.low}; } };

// where(condition, x, y)
struct Where {
  LOWBIT_OP("where", "bff>f");
  LOWBIT_VALUE3(a ? b : c)
  template <class E>
  static std::array<E, 2> derivative(E c, E, E, E) {
    return {where(c, E(1.0), E(0.0)), where(c, E(0.0), E(1.0))};
  }
  static Interval interval(Interval c, Interval a, Interval b) {
    if (c.is_point()) return c.low ? a : b;
    return {std::min(a.low, b.low), std::max(a.high, b.high)};
  }
};
struct WhereInt : Where { LOWBIT_OP("where_int", "bii>i"); };
struct WhereBool : Where { LOWBIT_OP("where_bool", "bbb>b"); };

// Conversions. Int (the template argument) is the int of a Float's size, and vice versa.
struct IntToFloat {
  LOWBIT_OP("int_to_float", "i>f");
  LOWBIT_VALUE1(float_of(a)) LOWBIT_RISING(double)
};
struct BoolToFloat {
  LOWBIT_OP("bool_to_float", "b>f");
  LOWBIT_VALUE1(float_of(a)) LOWBIT_RISING(double)
};
struct BoolToInt { LOWBIT_OP("bool_to_int", "b>i"); LOWBIT_VALUE1(a) LOWBIT_RISING(double) };
struct FloatToInt {
  LOWBIT_OP("float_to_int", "f>i");
  LOWBIT_VALUE1(int_of(a)) LOWBIT_RISING(std::trunc)
};  // toward zero
struct FloatToBool { LOWBIT_OP("float_to_bool", "f>b"); LOWBIT_VALUE1(a != 0)
  static Interval interval(Interval a) { return NotEqual::interval(a, {0, 0}); } };
struct IntToBool : FloatToBool { LOWBIT_OP("int_to_bool", "i>b"); };

#undef LOWBIT_OP
#undef LOWBIT_VALUE
#undef LOWBIT_VALUE1
#undef LOWBIT_VALUE2
#undef LOWBIT_VALUE3
#undef LOWBIT_DERIVATIVE1
#undef LOWBIT_DERIVATIVE2
#undef LOWBIT_RISING

}  // namespace score

template <class... Ops>
struct OpList {
  static constexpr int count = sizeof...(Ops);
};

// The number of an op is its position in this list. Saved programs (torch.export) contain numbers: append only. The ops
// without a value come first.
#define LOWBIT_SCORE_VALUES(F)                                                                                        \
  F(Copy) F(MultiplyAdd) F(ScaledTanh) F(Add) F(Sub) F(Mul) F(Div) F(Maximum) F(Minimum) F(Remainder) F(Fmod)         \
  F(FloorDivide) F(Pow) F(Neg) F(Sign) F(Abs) F(Floor) F(Ceil) F(Trunc) F(Round) F(Sqrt) F(Rsqrt) F(Exp) F(Exp2)      \
  F(Expm1) F(Log) F(Log2) F(Log1p) F(Sin) F(Cos) F(Tan) F(Atan) F(Tanh) F(Sigmoid) F(Erf) F(ToBfloat16) F(ToFloat16)  \
  F(AddInt) F(SubInt) F(MulInt) F(FloorDivideInt) F(RemainderInt) F(TruncDivideInt) F(FmodInt) F(MaximumInt)          \
  F(MinimumInt) F(NegInt) F(AbsInt) F(SignInt) F(AndInt) F(OrInt) F(XorInt) F(NotInt) F(ShiftLeft) F(ShiftRight)      \
  F(Less) F(LessEqual) F(Equal) F(NotEqual) F(LessInt) F(LessEqualInt) F(EqualInt) F(NotEqualInt) F(And) F(Or) F(Xor) \
  F(Not) F(Where) F(WhereInt) F(WhereBool) F(IntToFloat) F(BoolToFloat) F(BoolToInt) F(FloatToInt) F(FloatToBool)     \
  F(IntToBool)
#define LOWBIT_OP_BEHIND(name) , score::name
using ScoreOps = OpList<score::Score, score::B, score::H, score::Q, score::K, score::FloatConst, score::IntConst,
                        score::BoolConst, score::Gather, score::Gradient, score::KMinusQ, score::ScatterAdd,
                        score::Sum LOWBIT_SCORE_VALUES(LOWBIT_OP_BEHIND)>;
#undef LOWBIT_OP_BEHIND

template <class Op, class... Ops>
consteval int number_in(OpList<Ops...>) {
  int number = 0;
  const bool found = ((std::is_same_v<Op, Ops> || (number++, false)) || ...);
  return found ? number : throw "not in the list";
}
template <class Op>
consteval int number_of() { return number_in<Op>(ScoreOps{}); }

// Ops that report a divisor of 0.
constexpr bool divides_ints(int op) {
  using namespace score;
  return op == number_of<FloorDivideInt>() || op == number_of<RemainderInt>() || op == number_of<TruncDivideInt>() ||
         op == number_of<FmodInt>();
}

// Storage of an element of type 'f', 'i' or 'b' beside a Float.
template <char kType, class Float> using ScoreCell = std::conditional_t<kType == 'f', Float, IntBeside<Float>>;
template <class Op>
consteval int arity_of() { return static_cast<int>(Op::types.find('>')); }
template <class Op>
consteval bool has_value() {  // leaves and ops that access memory have none
  using namespace score;
  constexpr bool special = std::is_same_v<Op, ScatterAdd> || std::is_same_v<Op, Sum>;
  return arity_of<Op>() > 0 && !special;
}

}  // namespace lowbit
