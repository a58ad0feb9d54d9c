// SPDX-License-Identifier: Apache-2.0
// The functions called by score programs, linked by the driver (score/spirv.hpp): the ops of score/ops.hpp, and those
// that read captured tensors. A value has 32 bits: a float, an int, or a bool as 0 or 1.
#define LOWBIT_LANES 16
#include "level_zero/attention/call.hpp"
#include "level_zero/device/vectors.hpp"
#include "score/ops.hpp"

namespace lowbit::level_zero {

__device__ int32_t atomic_exchange(volatile Global<int32_t>* to, int32_t value) __asm__("_Z11atomic_xchgPU3AS1Vii");

template <char type>
LOWBIT_INLINE auto operand(uint32_t bits) {
  if constexpr (type == 'f') return float_from_bits(bits);
  else return static_cast<int32_t>(bits);
}

template <class Op>
LOWBIT_INLINE uint32_t value_of(uint32_t a, uint32_t b, uint32_t c) {
  constexpr auto types = Op::types;
  const auto value = [&] {
    if constexpr (arity_of<Op>() == 1) return Op::value(operand<types[0]>(a));
    else if constexpr (arity_of<Op>() == 2) return Op::value(operand<types[0]>(a), operand<types[1]>(b));
    else return Op::value(operand<types[0]>(a), operand<types[1]>(b), operand<types[2]>(c));
  }();
  if constexpr (types[arity_of<Op>() + 1] == 'f') return bits_of_float(static_cast<float>(value));
  else return static_cast<uint32_t>(value);
}

using Table = const Global<uint64_t>*;  // score_table

LOWBIT_INLINE void note_fault(Table table, int32_t tensor, int32_t dim, int32_t index) {
  auto* const fault = global<int32_t>(reinterpret_cast<void*>(table[0]));
  if (atomic_exchange(fault, 1) == 0) fault[1] = tensor, fault[2] = dim, fault[3] = index;
}

// The nearest float, ties to even, by integer arithmetic: many of these GPUs have no double.
LOWBIT_INLINE uint32_t float_bits_of_double(uint64_t bits) {
  const auto sign = static_cast<uint32_t>(bits >> 32) & 0x80000000u;
  const auto exponent = static_cast<int32_t>(bits >> 52 & 0x7ff) - (1023 - 127);  // exponent of a float
  const uint64_t fraction = bits & 0xfffffffffffffu;
  if (exponent == 0x7ff - (1023 - 127)) return sign | 0x7f800000u | (fraction ? 0x400000u : 0);
  const int32_t behind = exponent > 0 ? 29 : exponent < -24 ? 54 : 30 - exponent;  // digits beyond a float's precision
  const uint64_t digits = fraction | uint64_t{1} << 52, kept = digits >> behind, half = uint64_t{1} << (behind - 1);
  const uint64_t rest = digits & (2 * half - 1);
  const uint64_t magnitude = kept + (rest > half || (rest == half && kept & 1)) +
                             (exponent > 1 ? static_cast<uint64_t>(exponent - 1) << 23 : 0);
  return sign | (magnitude < 0x7f800000u ? static_cast<uint32_t>(magnitude) : 0x7f800000u);
}

}  // namespace lowbit::level_zero

namespace lz = lowbit::level_zero;
using lowbit::DType;

#define LOWBIT_OP(name)                                                                      \
  extern "C" __device__ uint32_t score_##name(uint32_t a, uint32_t b, uint32_t c) {          \
    return lz::value_of<lowbit::score::name>(a, b, c);                                       \
  }
LOWBIT_SCORE_VALUES(LOWBIT_OP)
#undef LOWBIT_OP

extern "C" __device__ void score_check_divisor(lz::Table table, int32_t divisor) {
  if (divisor == 0) lz::note_fault(table, -1, 0, 0);
}

// Adds one index to the offset `at` of an element: with the stride of a captured tensor, or (stride_at 0) in its
// gradient, which is contiguous.
extern "C" __device__ int64_t score_index(lz::Table table, int32_t size_at, int32_t stride_at, int32_t tensor,
                                          int32_t dim, int64_t at, int32_t index) {
  const auto size = static_cast<int64_t>(table[size_at]);
  const int64_t i = index < 0 ? index + size : index;
  if (i < 0 || i >= size) {
    lz::note_fault(table, tensor, dim, index);
    return lz::kOutside;
  }
  if (at == lz::kOutside) return at;
  return stride_at ? at + i * static_cast<int64_t>(table[stride_at]) : at * size + i;
}

extern "C" __device__ uint32_t score_element(lz::Table table, int32_t tensor, int32_t dtype, int64_t at) {
  if (at == lz::kOutside) return 0;
  const void* const data = reinterpret_cast<const void*>(table[1 + tensor]);
  switch (static_cast<DType>(dtype)) {
    case DType::float32: case DType::int32: return lz::global<uint32_t>(data)[at];
    case DType::bfloat16: return uint32_t{lz::global<uint16_t>(data)[at]} << 16;
    case DType::float16: return lowbit::bits_of_float(lowbit::float_from_float16(lz::global<uint16_t>(data)[at]));
    case DType::float64: return lz::float_bits_of_double(lz::global<uint64_t>(data)[at]);
    case DType::int64: return static_cast<uint32_t>(lz::global<uint64_t>(data)[at]);
    default: return lz::global<uint8_t>(data)[at] != 0;
  }
}
