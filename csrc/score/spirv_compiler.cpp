// SPDX-License-Identifier: Apache-2.0
#include "score/spirv_compiler.hpp"

#include <algorithm>

#include "core/error.hpp"
#include "score/spirv_function.hpp"

namespace lowbit::spirv {
namespace {

struct TypeWord {
  std::string_view word;
  Scalar scalar, unsigned_one = scalar;
};
constexpr TypeWord kTypeWords[] = {
    {"void", Scalar::nothing}, {"bool", Scalar::boolean}, {"char", Scalar::u8}, {"short", Scalar::u16},
    {"int", Scalar::i32, Scalar::u32}, {"long", Scalar::i64, Scalar::u64}, {"float", Scalar::f32},
    {"double", Scalar::f64}};
constexpr std::string_view kQualifiers[] = {"static", "inline", "const", "volatile", "__global", "unsigned"};

const TypeWord* type_word(std::string_view text) {
  const auto* found = std::ranges::find(kTypeWords, text, &TypeWord::word);
  return found == std::end(kTypeWords) ? nullptr : found;
}
bool is_qualifier(std::string_view text) { return std::ranges::find(kQualifiers, text) != std::end(kQualifiers); }

}  // namespace

Token Cursor::next() {
  const Token token = peek();
  check(token.kind != Token::Kind::end, ErrorKind::runtime, "score_spirv: the text ends early");
  at_++;
  return token;
}
bool Cursor::accept(std::string_view text) {
  const bool is = peek().text == text;
  at_ += is;
  return is;
}
void Cursor::expect(std::string_view text) {
  check(accept(text), ErrorKind::runtime, "score_spirv: ", peek().text, " where ", text, " should be");
}
bool Cursor::is_type() const { return is_qualifier(peek().text) || type_word(peek().text); }

Type Cursor::type() {
  Type type;
  bool is_unsigned = false;
  while (is_type()) {
    const std::string_view text = next().text;
    is_unsigned |= text == "unsigned";
    if (const TypeWord* word = type_word(text)) type.scalar = is_unsigned ? word->unsigned_one : word->scalar;
  }
  type.pointer = accept("*");
  return type;
}

void Compiler::read(std::string text) {
  texts_.push_back(std::move(text));
  tokens_.push_back(macros_.read(texts_.back()));
  Cursor cursor(tokens_.back());
  while (cursor.peek().kind != Token::Kind::end) {
    Function function{.result = cursor.type(), .tokens = &tokens_.back()};
    const std::string_view name = cursor.next().text;
    cursor.expect("(");
    while (!cursor.accept(")")) {
      const Type type = cursor.type();
      function.parameters.push_back({type, cursor.next().text});
      cursor.accept(",");
    }
    function.body = cursor.at();
    int depth = 0;
    do {
      const std::string_view sign = cursor.next().text;
      depth += (sign == "{") - (sign == "}");
    } while (depth > 0);
    functions_[name] = std::move(function);
  }
}

Function* Compiler::find(std::string_view name) {
  const auto found = functions_.find(name);
  return found == functions_.end() ? nullptr : &found->second;
}

Id Compiler::compiled(Function& function) {
  if (function.id == 0) {
    function.id = module_.fresh();
    module_.add_function(FunctionWriter(*this, function).write());
  }
  return function.id;
}

void Compiler::export_function(std::string_view declared, std::string_view name) {
  Function* function = find(declared);
  check(function, ErrorKind::runtime, "score_spirv: no function ", declared);
  module_.export_function(compiled(*function), name);
}

Id Compiler::add_to() {
  if (add_to_) return add_to_;
  const Type nothing, real{Scalar::f32}, bits{Scalar::u32}, parameters[] = {{Scalar::f32, true}, real};
  if (imports_add_) {
    const Type of_sum[] = {parameters[0], real, {Scalar::i32, true}};
    return add_to_ = module_.import_function("add_to_sum", nothing, of_sum);
  }
  const Id of_function = module_.function_type(nothing, parameters), word = module_.type(bits),
           number = module_.type(real), truth = module_.type({Scalar::boolean}),
           device = module_.constant(bits, 1), relaxed = module_.constant(bits, 0);
  const Id to = module_.fresh(), added = module_.fresh(), begin = module_.fresh(), again = module_.fresh(),
           end = module_.fresh(), at = module_.fresh(), first = module_.fresh(), before = module_.fresh(),
           old = module_.fresh(), sum = module_.fresh(), wanted = module_.fresh(), found = module_.fresh(),
           done = module_.fresh();
  add_to_ = module_.fresh();
  Words body;
  put(body, Op::function, {module_.type(nothing), add_to_, 0, of_function});
  put(body, Op::function_parameter, {module_.type(parameters[0]), to});
  put(body, Op::function_parameter, {number, added});
  put(body, Op::label, {begin});
  put(body, Op::bitcast, {module_.type({Scalar::u32, true}), at, to});
  put(body, Op::load, {word, first, at, 2, 4});
  put(body, Op::branch, {again});
  put(body, Op::label, {again});
  put(body, Op::phi, {word, before, first, begin, found, again});
  put(body, Op::bitcast, {number, old, before});
  put(body, Op::f_add, {number, sum, old, added});
  put(body, Op::bitcast, {word, wanted, sum});
  put(body, Op::atomic_compare_exchange, {word, found, at, device, relaxed, relaxed, wanted, before});
  put(body, Op::i_equal, {truth, done, found, before});
  put(body, Op::branch_conditional, {done, end, again});
  put(body, Op::label, {end});
  put(body, Op::return_nothing, {std::initializer_list<uint32_t>{}});
  put(body, Op::function_end, {std::initializer_list<uint32_t>{}});
  module_.add_function(body);
  return add_to_;
}

}  // namespace lowbit::spirv
