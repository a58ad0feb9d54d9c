// SPDX-License-Identifier: Apache-2.0
// One function while it is compiled (spirv_compiler.hpp).
#pragma once

#include "score/spirv_compiler.hpp"

namespace lowbit::spirv {

struct Value {
  Id id = 0;
  Type type;
  bool in_memory = false;  // id is its address
};

// Instructions on values, with the conversions of C.
class Emitter {
 public:
  explicit Emitter(Module& module) : module_(module) {}

 protected:
  Id emit(Op op, Id result_type, std::initializer_list<uint32_t> operands);
  Value value(Op op, Type type, std::initializer_list<uint32_t> operands) {
    return {emit(op, module_.type(type), operands), type};
  }
  Value number(Type type, double number);
  Value loaded(Value value);
  void store(Value to, Value value);
  Value converted(Value value, Type type);
  Value truth(Value value) { return converted(value, {Scalar::boolean}); }
  Value promoted(Value value) { return converted(value, common(value.type, {Scalar::i32})); }
  static Type common(Type a, Type b);  // of the usual arithmetic conversions
  Value binary(std::string_view sign, Value left, Value right);

  Module& module_;
  Words body_;
  bool guarded_ = false;  // something was emitted that must not run where it is not asked for
};

class FunctionWriter : Emitter {
 public:
  FunctionWriter(Compiler& compiler, Function& function);
  Words write();

 private:
  // Of a conditional: instructions that make a value, in blocks of their own should they be needed.
  struct Arm {
    Words body{};
    Value value{};
    Id begin = 0, end = 0;  // their labels
    bool guarded = false;
  };

  void statement();
  void declaration();
  void if_statement();
  void label(Id id);
  Value expression();
  Value conditional();
  Arm arm(Value (FunctionWriter::*parse)());
  void convert(Arm& arm, Type type);
  Value chosen(Value condition, const Arm& yes, const Arm& no);
  Value binary_from(int least);
  Value unary();
  Value postfix();
  Value primary();
  Value literal(std::string_view text);
  Value call(std::string_view name);

  Compiler& compiler_;
  Function& function_;
  Cursor cursor_;
  std::map<std::string_view, Value> variables_;
  Id block_ = 0;
  bool returned_ = false;
};

}  // namespace lowbit::spirv
