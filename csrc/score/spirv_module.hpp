// SPDX-License-Identifier: Apache-2.0
// A module of SPIR-V while it is written: its types and constants, each declared once, and its functions. Numbers are
// those of the specification (SPIR-V 1.2, environment of OpenCL).
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <set>
#include <span>
#include <string_view>
#include <vector>

namespace lowbit::spirv {

using Id = uint32_t;
using Words = std::vector<uint32_t>;

enum class Op : uint16_t {
  ext_inst_import = 11, ext_inst = 12, memory_model = 14, capability = 17,
  type_void = 19, type_bool = 20, type_int = 21, type_float = 22, type_pointer = 32, type_function = 33,
  constant_true = 41, constant_false = 42, constant = 43,
  function = 54, function_parameter = 55, function_end = 56, function_call = 57,
  load = 61, store = 62, ptr_access_chain = 67, decorate = 71,
  convert_f_to_s = 110, convert_s_to_f = 111, convert_u_to_f = 112, u_convert = 113, s_convert = 114, f_convert = 115,
  convert_ptr_to_u = 117, convert_u_to_ptr = 120, bitcast = 124,
  s_negate = 126, f_negate = 127, i_add = 128, f_add = 129, i_sub = 130, f_sub = 131, i_mul = 132, f_mul = 133,
  u_div = 134, s_div = 135, f_div = 136, u_mod = 137, s_rem = 138,
  logical_equal = 164, logical_or = 166, logical_and = 167, select = 169,
  i_equal = 170, i_not_equal = 171, u_greater_than = 172, s_greater_than = 173, u_greater_than_equal = 174,
  s_greater_than_equal = 175, u_less_than = 176, s_less_than = 177, u_less_than_equal = 178, s_less_than_equal = 179,
  f_ord_equal = 180, f_unord_not_equal = 183, f_ord_less_than = 184, f_ord_greater_than = 186,
  f_ord_less_than_equal = 188, f_ord_greater_than_equal = 190,
  shift_right_logical = 194, shift_right_arithmetic = 195, shift_left_logical = 196,
  bitwise_or = 197, bitwise_xor = 198, bitwise_and = 199, bitwise_not = 200,
  atomic_exchange = 229, atomic_compare_exchange = 230,
  phi = 245, label = 248, branch = 249, branch_conditional = 250, return_nothing = 253, return_value = 254,
};

// All that a module may ask of a device.
enum class Capability : uint32_t {
  addresses = 4, linkage = 5, kernel = 6, float64 = 10, int64 = 11, int16 = 22, int8 = 39
};

enum class Scalar : uint8_t { nothing, boolean, u8, u16, i32, u32, i64, u64, f32, f64 };
struct Type {
  Scalar scalar = Scalar::nothing;
  bool pointer = false;  // to global memory
  friend bool operator==(Type, Type) = default;
};
int bytes_of(Type type);
bool is_float(Type type);
bool is_signed(Type type);

class Module {
 public:
  Module();
  Id fresh() { return bound_++; }
  Id type(Type type);
  Id function_type(Type result, std::span<const Type> parameters);
  Id constant(Type type, uint64_t bits);
  Id library() const { return kLibrary; }  // OpenCL.std
  void add_function(const Words& words) { functions_.insert(functions_.end(), words.begin(), words.end()); }
  void export_function(Id function, std::string_view name);
  Id import_function(std::string_view name, Type result, std::span<const Type> parameters);
  Words words() const;

 private:
  static constexpr Id kLibrary = 1;
  Id declared(Op op, Id result_type, std::span<const uint32_t> operands);  // result_type 0: none, of a type itself
  Id bound_ = kLibrary + 1;
  std::set<Capability> capabilities_{Capability::addresses, Capability::linkage, Capability::kernel};
  std::map<Words, Id> known_;
  Words decorations_, globals_, declarations_, functions_;
};

// An instruction: its operands, between them a string in words of four bytes.
void put(Words& to, Op op, std::initializer_list<std::span<const uint32_t>> operands);
inline void put(Words& to, Op op, std::initializer_list<uint32_t> operands) {
  put(to, op, {std::span<const uint32_t>(operands.begin(), operands.size())});
}

}  // namespace lowbit::spirv
