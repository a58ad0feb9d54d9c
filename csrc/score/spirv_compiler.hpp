// SPDX-License-Identifier: Apache-2.0
// The C of printed programs (print.hpp) to SPIR-V: functions of numbers and of pointers to global memory whose
// variables are written once, with `if` and `return`. A function is compiled when it is first called.
#pragma once

#include <deque>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "score/spirv_module.hpp"
#include "score/spirv_tokens.hpp"

namespace lowbit::spirv {

struct Parameter {
  Type type;
  std::string_view name;
};
struct Function {
  Type result;
  std::vector<Parameter> parameters{};
  const Tokens* tokens = nullptr;
  std::size_t body = 0;  // the token `{`
  Id id = 0;             // 0: not compiled
};

// Tokens, one after the other.
class Cursor {
 public:
  explicit Cursor(const Tokens& tokens, std::size_t at = 0) : tokens_(&tokens), at_(at) {}
  Token peek() const { return at_ < tokens_->size() ? (*tokens_)[at_] : Token{}; }
  Token next();
  bool accept(std::string_view text);
  void expect(std::string_view text);
  bool is_type() const;
  Type type();
  std::size_t at() const { return at_; }

 private:
  const Tokens* tokens_;
  std::size_t at_;
};

class Compiler {
 public:
  // imports_add: add_to is another module's, and is told where faults are noted: void add_to_sum(float*, float, int*).
  explicit Compiler(bool imports_add = false) : imports_add_(imports_add) {}

  // Declares what is in a text: later texts may declare a name anew.
  void read(std::string text);
  void export_function(std::string_view declared, std::string_view name);
  Function* find(std::string_view name);
  Id compiled(Function& function);
  Id add_to();  // void (float*, float), atomically: OpenCL C has no such function before 3.0
  bool imports_add() const { return imports_add_; }
  Module& module() { return module_; }

 private:
  Module module_;
  Macros macros_;
  std::deque<std::string> texts_;
  std::deque<Tokens> tokens_;
  std::map<std::string_view, Function> functions_;
  bool imports_add_;
  Id add_to_ = 0;
};

}  // namespace lowbit::spirv
