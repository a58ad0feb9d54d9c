// SPDX-License-Identifier: Apache-2.0
// The arguments of a call by the names of its schema: get<"scale">(given). The text of the schema is the one
// description of an op: the compiler reads the names, the types and the places on the stack from it, and refuses a
// name that it does not have.
//
// The stack hands every tensor and list over. All of them are taken before a kernel begins, which cannot throw, so that
// an error frees them too.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "torch/boxed.hpp"
#include "torch/ops.hpp"

namespace lowbit::torch {

template <std::size_t size>
struct Text {  // a literal, as a template argument too
  char text[size]{};

  constexpr Text(const char (&literal)[size]) { std::copy_n(literal, size, text); }
  constexpr operator std::string_view() const { return {text, size - 1}; }
};

// One literal of several.
template <std::size_t... sizes>
constexpr auto joined(const char (&... parts)[sizes]) {
  char text[(sizes + ...) - sizeof...(sizes) + 1]{};
  char* end = text;
  ((end = std::copy_n(parts, sizes - 1, end)), ...);
  return Text(text);
}

// How the stack holds an argument, and what a kernel gets of it.
enum class Kind { tensor, optional_tensor, list, integer, number, boolean };

struct Argument {
  std::string_view name;
  Kind kind;
};

constexpr Kind kind_of(std::string_view type) {
  if (type.ends_with("[]")) return Kind::list;
  if (type == "Tensor?") return Kind::optional_tensor;
  if (type == "Tensor" || type.starts_with("Tensor(")) return Kind::tensor;  // Tensor(a!): written
  if (type == "int" || type == "SymInt") return Kind::integer;
  if (type == "float") return Kind::number;
  if (type == "bool") return Kind::boolean;
  throw "a schema with a type that is not decoded";
}

// "op(Tensor x, int activation=0) -> Tensor"
constexpr std::string_view arguments_of(std::string_view schema) {
  const std::size_t begin = schema.find('(') + 1;
  return schema.substr(begin, schema.rfind(") -> ") - begin);
}

constexpr std::string_view op_of(std::string_view schema) {
  const std::string_view name = schema.substr(0, schema.find('('));
  return name.ends_with('_') ? name.substr(0, name.size() - 1) : name;  // torch's mark of an op that writes
}

template <class Op>
constexpr auto parsed() {
  constexpr std::string_view all = arguments_of(Op::schema);
  std::array<Argument, std::count(all.begin(), all.end(), ',') + 1> arguments{};
  std::string_view rest = all;
  for (Argument& argument : arguments) {
    const std::string_view whole = rest.substr(0, rest.find(", "));
    rest.remove_prefix(std::min(rest.size(), whole.size() + 2));
    const std::string_view text = whole.substr(0, whole.find('='));
    const std::size_t space = text.rfind(' ');
    argument = {text.substr(space + 1), kind_of(text.substr(0, space))};
  }
  return arguments;
}

template <Kind kind>
auto take(StableIValue value) {
  if constexpr (kind == Kind::tensor) return Tensor::take(value);
  else if constexpr (kind == Kind::optional_tensor) return Tensor::take_optional(value);
  else if constexpr (kind == Kind::list) return List::take(value);
  else if constexpr (kind == Kind::integer) return to_int(value);
  else if constexpr (kind == Kind::number) return std::bit_cast<double>(value);
  else return to_bool(value);
}

template <class Op, std::size_t index>
struct Taken {
  decltype(take<parsed<Op>()[index].kind>(0)) value;
};

template <class Op, class = std::make_index_sequence<parsed<Op>().size()>>
struct AllTaken;
template <class Op, std::size_t... index>
struct AllTaken<Op, std::index_sequence<index...>> : Taken<Op, index>... {
  explicit AllTaken(const StableIValue* stack)
      : Taken<Op, index>{take<parsed<Op>()[index].kind>(stack[index])}... {}
};

// Op has a `schema`, and a `run` that gets these and returns a Tensor, a List, an array of Tensors or nothing.
template <class Op>
struct Arguments : private AllTaken<Op> {
  static constexpr std::string_view op = op_of(Op::schema);  // as errors say it

  using AllTaken<Op>::AllTaken;
  template <Text name>
  auto& get() {
    constexpr auto arguments = parsed<Op>();
    constexpr std::size_t index =
        std::find_if(arguments.begin(), arguments.end(), [](const Argument& it) { return it.name == name; }) -
        arguments.begin();
    static_assert(index < arguments.size(), "the schema has no argument of this name");
    return static_cast<Taken<Op, index>&>(*this).value;
  }
};

template <Text name, class Op>
auto& get(Arguments<Op>& given) { return given.template get<name>(); }
template <Text name, class Op>
TensorView view(Arguments<Op>& given) { return get<name>(given).view(given.op, name); }
template <Text name, class Op>
TensorView written_view(Arguments<Op>& given) { return get<name>(given).written_view(given.op, name); }
template <Text name, class Op>
TensorView dense_view(Arguments<Op>& given) { return get<name>(given).dense_view(given.op, name); }
template <Text name, class Op>
TensorView contiguous_view(Arguments<Op>& given) { return get<name>(given).contiguous_view(given.op, name); }

inline void give(StableIValue* stack, Tensor&& result) { *stack = to_value(std::move(result)); }
inline void give(StableIValue* stack, List&& result) { *stack = to_value(std::move(result)); }
template <std::size_t count>
void give(StableIValue* stack, std::array<Tensor, count>&& results) {
  for (Tensor& result : results) *stack++ = to_value(std::move(result));
}

template <class Op>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  try {
    Arguments<Op> given(stack);
    if constexpr (std::is_void_v<decltype(Op::run(given))>) Op::run(given);
    else give(stack, Op::run(given));
  } catch (const Error& error) {
    rethrow_for_torch(error);
  }
}

template <class Op>
constexpr RegisteredOp registered() {
  constexpr std::string_view schema = Op::schema;
  return {schema.substr(0, schema.find('(')), Op::schema.text, boxed<Op>};
}

}  // namespace lowbit::torch
