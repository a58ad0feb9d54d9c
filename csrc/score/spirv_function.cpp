// SPDX-License-Identifier: Apache-2.0
#include "score/spirv_function.hpp"

#include <charconv>
#include <utility>

#include "core/error.hpp"
#include "score/spirv_binary.hpp"

namespace lowbit::spirv {
namespace {

// Functions of OpenCL.std on floats: the number of an instruction is its place here.
constexpr std::string_view kLibrary[] = {
    "acos", "acosh", "acospi", "asin", "asinh", "asinpi", "atan", "atan2", "atanh", "atanpi", "atan2pi", "cbrt", "ceil",
    "copysign", "cos", "cosh", "cospi", "erfc", "erf", "exp", "exp2", "exp10", "expm1", "fabs", "fdim", "floor", "fma",
    "fmax", "fmin", "fmod", "fract", "frexp", "hypot", "ilogb", "ldexp", "lgamma", "lgamma_r", "log", "log2", "log10",
    "log1p", "logb", "mad", "maxmag", "minmag", "modf", "nan", "nextafter", "pow", "pown", "powr", "remainder",
    "remquo", "rint", "rootn", "round", "rsqrt", "sin", "sincos", "sinh", "sinpi", "sqrt", "tan", "tanh", "tanpi",
    "tgamma", "trunc"};

constexpr uint32_t kInline = 1, kDevice = 1, kRelaxed = 0;  // function control, scope, memory semantics
constexpr Type kFloat{Scalar::f32}, kInt{Scalar::i32}, kUnsigned{Scalar::u32};

}  // namespace

FunctionWriter::FunctionWriter(Compiler& compiler, Function& function)
    : Emitter(compiler.module()), compiler_(compiler), function_(function), cursor_(*function.tokens, function.body) {}

Words FunctionWriter::write() {
  std::vector<Type> types;
  for (const Parameter& parameter : function_.parameters) types.push_back(parameter.type);
  put(body_, Op::function, {module_.type(function_.result), function_.id, kInline,
                            module_.function_type(function_.result, types)});
  for (const Parameter& parameter : function_.parameters)
    variables_[parameter.name] = value(Op::function_parameter, parameter.type, {});
  label(module_.fresh());
  statement();
  if (!returned_) put(body_, Op::return_nothing, {std::initializer_list<uint32_t>{}});
  put(body_, Op::function_end, {std::initializer_list<uint32_t>{}});
  return std::move(body_);
}

void FunctionWriter::label(Id id) {
  put(body_, Op::label, {id});
  block_ = id, returned_ = false;
}

void FunctionWriter::statement() {
  if (cursor_.accept("{")) {
    while (!cursor_.accept("}")) statement();
  } else if (cursor_.accept("if")) {
    if_statement();
  } else if (cursor_.accept("return")) {
    put(body_, Op::return_value, {converted(expression(), function_.result).id});
    returned_ = true;
    cursor_.expect(";");
  } else if (cursor_.is_type()) {
    declaration();
  } else {
    loaded(expression());
    cursor_.expect(";");
  }
}

void FunctionWriter::declaration() {
  const Type type = cursor_.type();
  do {
    const std::string_view name = cursor_.next().text;
    cursor_.expect("=");
    variables_[name] = converted(conditional(), type);
  } while (cursor_.accept(","));
  cursor_.expect(";");
}

void FunctionWriter::if_statement() {
  cursor_.expect("(");
  const Value condition = truth(expression());
  cursor_.expect(")");
  const Id then = module_.fresh(), after = module_.fresh();
  put(body_, Op::branch_conditional, {condition.id, then, after});
  label(then);
  statement();
  if (!returned_) put(body_, Op::branch, {after});
  label(after);
}

Value FunctionWriter::expression() {
  Value value = conditional();
  if (cursor_.accept("=")) store(value, conditional());
  return cursor_.accept(",") ? expression() : value;
}

Value FunctionWriter::conditional() {
  const Value condition = binary_from(1);
  if (!cursor_.accept("?")) return condition;
  const Value asked = truth(condition);
  Arm yes = arm(&FunctionWriter::expression);
  cursor_.expect(":");
  Arm no = arm(&FunctionWriter::conditional);
  const Type type = yes.value.type == no.value.type ? yes.value.type : common(yes.value.type, no.value.type);
  convert(yes, type), convert(no, type);
  return chosen(asked, yes, no);
}

FunctionWriter::Arm FunctionWriter::arm(Value (FunctionWriter::*parse)()) {
  Arm made{.begin = module_.fresh()};
  Words before = std::exchange(body_, {});
  const Id block = std::exchange(block_, made.begin);
  const bool guarded = std::exchange(guarded_, false);
  made.value = loaded((this->*parse)());
  made.end = std::exchange(block_, block);
  made.guarded = std::exchange(guarded_, guarded);
  made.body = std::exchange(body_, std::move(before));
  return made;
}

void FunctionWriter::convert(Arm& arm, Type type) {
  body_.swap(arm.body);
  arm.value = converted(arm.value, type);
  body_.swap(arm.body);
}

// Both, and one is taken; where that must not be, or where an arm has blocks already, by branches.
Value FunctionWriter::chosen(Value condition, const Arm& yes, const Arm& no) {
  const bool guarded = yes.guarded || no.guarded;
  const Id after = guarded ? module_.fresh() : 0;
  if (guarded) put(body_, Op::branch_conditional, {condition.id, yes.begin, no.begin});
  for (const Arm* arm : {&yes, &no}) {
    if (guarded) label(arm->begin);
    body_.insert(body_.end(), arm->body.begin(), arm->body.end());
    if (guarded) put(body_, Op::branch, {after});
  }
  if (!guarded) return value(Op::select, yes.value.type, {condition.id, yes.value.id, no.value.id});
  label(after);
  guarded_ = true;
  return value(Op::phi, yes.value.type, {yes.value.id, yes.end, no.value.id, no.end});
}

Value FunctionWriter::binary_from(int least) {
  Value left = unary();
  while (const Binary* op = binary_of(cursor_.peek().text)) {
    if (op->precedence < least) break;
    cursor_.next();
    left = binary(op->sign, left, binary_from(op->precedence + 1));
  }
  return left;
}

Value FunctionWriter::unary() {
  if (cursor_.accept("-")) {
    const Value of = promoted(unary());
    return value(is_float(of.type) ? Op::f_negate : Op::s_negate, of.type, {of.id});
  }
  if (cursor_.accept("~")) {
    const Value of = promoted(unary());
    return value(Op::bitwise_not, of.type, {of.id});
  }
  if (cursor_.accept("!")) {  // Intel's compiler of 2022 dies of OpLogicalNot
    const Type boolean{Scalar::boolean};
    return value(Op::logical_equal, boolean, {truth(unary()).id, number(boolean, 0).id});
  }
  if (cursor_.peek().text != "(") return postfix();
  Cursor behind = cursor_;
  behind.next();
  if (!behind.is_type()) return postfix();
  cursor_ = behind;
  const Type type = cursor_.type();
  cursor_.expect(")");
  return converted(unary(), type);
}

Value FunctionWriter::postfix() {
  Value value = primary();
  while (cursor_.accept("[")) {
    const Value at = binary("+", value, expression());
    cursor_.expect("]");
    value = {at.id, {at.type.scalar}, true};
  }
  return value;
}

Value FunctionWriter::primary() {
  const Token token = cursor_.next();
  if (token.kind == Token::Kind::number) return literal(token.text);
  if (token.text == "(") {
    const Value value = expression();
    cursor_.expect(")");
    return value;
  }
  if (token.text == "sizeof") {
    cursor_.expect("(");
    const Type type = cursor_.type();
    cursor_.expect(")");
    return number(kInt, bytes_of(type));
  }
  if (cursor_.accept("(")) return call(token.text);
  const auto found = variables_.find(token.text);
  check(found != variables_.end(), ErrorKind::runtime, "score_spirv: no variable ", token.text);
  return found->second;
}

Value FunctionWriter::literal(std::string_view text) {
  const char *begin = text.data(), *end = begin + text.size();
  if (text.starts_with("0x") || text.find_first_of(".ef") == std::string_view::npos) {
    uint64_t bits = 0;
    const bool hexadecimal = text.starts_with("0x");
    std::from_chars(begin + (hexadecimal ? 2 : 0), end, bits, hexadecimal ? 16 : 10);
    const Type type = text.ends_with('u') ? kUnsigned : bits > INT32_MAX ? Type{Scalar::i64} : kInt;
    return {module_.constant(type, bits), type};
  }
  float single = 0;
  double twice = 0;
  if (!text.ends_with('f')) return std::from_chars(begin, end, twice), number({Scalar::f64}, twice);
  return std::from_chars(begin, end, single), number(kFloat, single);
}

Value FunctionWriter::call(std::string_view name) {
  std::vector<Value> arguments;
  while (!cursor_.accept(")")) {
    arguments.push_back(loaded(conditional()));
    cursor_.accept(",");
  }
  Words ids;
  if (Function* function = compiler_.find(name)) {
    ids = {module_.type(function->result), module_.fresh(), compiler_.compiled(*function)};
    for (std::size_t i = 0; i < arguments.size(); i++)
      ids.push_back(converted(arguments[i], function->parameters.at(i).type).id);
    put(body_, Op::function_call, {ids});
    guarded_ = true;
    return {ids[1], function->result};
  }
  if (name == "as_uint") return value(Op::bitcast, kUnsigned, {arguments.at(0).id});
  if (name == "as_float") return value(Op::bitcast, kFloat, {arguments.at(0).id});
  if (name == "atomic_xchg")
    return value(Op::atomic_exchange, kInt, {arguments.at(0).id, number(kUnsigned, kDevice).id,
                                             number(kUnsigned, kRelaxed).id, arguments.at(1).id});
  if (name == "add_to" && compiler_.imports_add())
    return value(Op::function_call, {}, {compiler_.add_to(), arguments.at(0).id, arguments.at(1).id,
                                         variables_.at("fault").id});
  if (name == "add_to")
    return value(Op::function_call, {}, {compiler_.add_to(), arguments.at(0).id, arguments.at(1).id});
  const auto* found = std::ranges::find(kLibrary, name);
  check(found != std::end(kLibrary), ErrorKind::runtime, "score_spirv: no function ", name);
  const Value result{module_.fresh(), kFloat};
  ids = {module_.type(kFloat), result.id, module_.library(), static_cast<uint32_t>(found - kLibrary)};
  for (const Value& argument : arguments) ids.push_back(converted(argument, kFloat).id);
  put(body_, Op::ext_inst, {ids});
  return result;
}

}  // namespace lowbit::spirv
