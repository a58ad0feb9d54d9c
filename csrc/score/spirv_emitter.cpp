// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>

#include "core/error.hpp"
#include "score/spirv_binary.hpp"
#include "score/spirv_function.hpp"

namespace lowbit::spirv {
namespace {

constexpr uint32_t kAligned = 2;  // memory operand, followed by the bytes

constexpr Type kBoolean{Scalar::boolean}, kWord{Scalar::u64};

Op int_conversion(Type from) { return is_signed(from) ? Op::s_convert : Op::u_convert; }

}  // namespace

Id Emitter::emit(Op op, Id result_type, std::initializer_list<uint32_t> operands) {
  const Id id = module_.fresh();
  const uint32_t ids[] = {result_type, id};
  put(body_, op, {ids, std::span(operands.begin(), operands.size())});
  guarded_ |= op == Op::load || op == Op::function_call || op == Op::s_div || op == Op::u_div || op == Op::s_rem ||
              op == Op::u_mod || op == Op::atomic_exchange;
  return id;
}

Value Emitter::number(Type type, double number) {
  uint64_t bits = 0;
  if (type.scalar == Scalar::f64) bits = std::bit_cast<uint64_t>(number);
  else if (type.scalar == Scalar::f32) bits = std::bit_cast<uint32_t>(static_cast<float>(number));
  else bits = static_cast<uint64_t>(number);
  return {module_.constant(type, bits), type};
}

Value Emitter::loaded(Value at) {
  if (!at.in_memory) return at;
  return value(Op::load, at.type, {at.id, kAligned, static_cast<uint32_t>(bytes_of(at.type))});
}

void Emitter::store(Value to, Value value) {
  put(body_, Op::store, {to.id, converted(value, to.type).id, kAligned, static_cast<uint32_t>(bytes_of(to.type))});
  guarded_ = true;
}

Value Emitter::converted(Value from, Type type) {
  const Value given = loaded(from);
  if (given.type == type) return given;
  if (type == kBoolean) {
    const Value of_pointer = given.type.pointer ? value(Op::convert_ptr_to_u, kWord, {given.id}) : given;
    return value(is_float(given.type) ? Op::f_unord_not_equal : Op::i_not_equal, type,
                 {of_pointer.id, number(of_pointer.type, 0).id});
  }
  if (given.type == kBoolean) return value(Op::select, type, {given.id, number(type, 1).id, number(type, 0).id});
  if (type.pointer && given.type.pointer && bytes_of({type.scalar}) == bytes_of({given.type.scalar}) &&
      is_float({type.scalar}) == is_float({given.type.scalar}))
    return {given.id, type};
  if (type.pointer) return value(given.type.pointer ? Op::bitcast : Op::convert_u_to_ptr, type, {given.id});
  if (is_float(given.type)) return value(is_float(type) ? Op::f_convert : Op::convert_f_to_s, type, {given.id});
  if (is_float(type)) return value(is_signed(given.type) ? Op::convert_s_to_f : Op::convert_u_to_f, type, {given.id});
  if (bytes_of(type) == bytes_of(given.type)) return {given.id, type};
  return value(int_conversion(given.type), type, {given.id});
}

Type Emitter::common(Type a, Type b) { return {std::max({a.scalar, b.scalar, Scalar::i32})}; }

Value Emitter::binary(std::string_view sign, Value left, Value right) {
  const Binary& op = *binary_of(sign);
  left = loaded(left), right = loaded(right);
  if (op.of_float == Op::logical_and || op.of_float == Op::logical_or)
    return value(op.of_float, kBoolean, {truth(left).id, truth(right).id});
  if (left.type.pointer) return value(Op::ptr_access_chain, left.type, {left.id, converted(right, kWord).id});
  const bool shifts = sign == "<<" || sign == ">>";
  const Type type = shifts ? promoted(left).type : common(left.type, right.type);
  const Op chosen = is_float(type) ? op.of_float : is_signed(type) ? op.of_signed : op.of_unsigned;
  const Id a = converted(left, type).id, b = converted(right, type).id;
  return value(chosen, op.compares ? kBoolean : type, {a, b});
}

}  // namespace lowbit::spirv
