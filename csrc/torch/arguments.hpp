// SPDX-License-Identifier: Apache-2.0
// The arguments of a call by their names in the schema: get<"scale">(given). The text of the schema is the only
// description of an op: the compiler reads names, types and stack positions from it, and rejects an unknown name.
//
// The stack transfers ownership of each tensor and list. All are taken, which cannot throw, before a kernel begins, so
// that an error frees them too.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "ops/kernel.hpp"
#include "torch/boxed.hpp"
#include "torch/c_shim.hpp"
#include "torch/described.hpp"
#include "torch/ops.hpp"

namespace lowbit::torch {

template <std::size_t size>
struct Text {  // a literal that can be a template argument
  char text[size]{};

  constexpr Text(const char (&literal)[size]) { std::copy_n(literal, size, text); }
  constexpr operator std::string_view() const { return {text, size - 1}; }
};

// Concatenates literals.
template <std::size_t... sizes>
constexpr auto joined(const char (&... parts)[sizes]) {
  char text[(sizes + ...) - sizeof...(sizes) + 1]{};
  char* end = text;
  ((end = std::copy_n(parts, sizes - 1, end)), ...);
  return Text(text);
}

constexpr Kind kind_of(std::string_view type) {
  if (type.ends_with("[]")) return Kind::list;
  if (type == "Tensor?") return Kind::optional_tensor;
  if (type == "Tensor" || type.starts_with("Tensor(")) return Kind::tensor;  // Tensor(a!): written to
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
  return name.ends_with('_') ? name.substr(0, name.size() - 1) : name;  // '_': writes to arguments
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
    const std::string_view type = text.substr(0, space);
    argument = {text.substr(space + 1), type, kind_of(type)};
  }
  return arguments;
}

template <class Op>
constexpr auto kArguments = parsed<Op>();

template <class Op, Text name>
constexpr std::size_t place_of_argument() {
  constexpr std::size_t place =
      std::find_if(kArguments<Op>.begin(), kArguments<Op>.end(), [](const Argument& it) { return it.name == name; }) -
      kArguments<Op>.begin();
  static_assert(place < kArguments<Op>.size(), "the schema has no argument of this name");
  return place;
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
  decltype(take<kArguments<Op>[index].kind>(0)) value;
};

template <class Op, class = std::make_index_sequence<kArguments<Op>.size()>>
struct AllTaken;
template <class Op, std::size_t... index>
struct AllTaken<Op, std::index_sequence<index...>> : Taken<Op, index>... {
  explicit AllTaken(const StableIValue* stack)
      : Taken<Op, index>{take<kArguments<Op>[index].kind>(stack[index])}... {}
};

// Op has a `schema`; `args_of`, which makes every check and accepts these or a Description; and a `run` that gets these
// and returns a Tensor, a List, an array of Tensors or nothing.
template <class Op>
struct Arguments : private AllTaken<Op> {
  static constexpr std::string_view op = op_of(Op::schema);  // name in errors

  using AllTaken<Op>::AllTaken;
  template <Text name>
  auto& get() { return at<place_of_argument<Op, name>()>(); }
  template <std::size_t place>
  auto& at() { return static_cast<Taken<Op, place>&>(*this).value; }
};

// The same for a traced call.
template <Kind kind>
struct DescribedAs { using type = DescribedTensor; };
template <> struct DescribedAs<Kind::list> { using type = DescribedList; };
template <> struct DescribedAs<Kind::integer> { using type = int64_t; };
template <> struct DescribedAs<Kind::number> { using type = double; };
template <> struct DescribedAs<Kind::boolean> { using type = bool; };

template <class Op>
struct Description {
  static constexpr std::string_view op = op_of(Op::schema);
  std::span<const DescribedValue> values;

  template <Text name>
  const auto& get() const {
    constexpr std::size_t place = place_of_argument<Op, name>();
    return std::get<typename DescribedAs<kArguments<Op>[place].kind>::type>(values[place]);
  }
};

// An argument of an Arguments or a Description.
template <Text name, class Given>
auto& get(Given& given) { return given.template get<name>(); }
template <Text name, class Given>
TensorView view(Given& given) { return get<name>(given).view(given.op, name); }
template <Text name, class Given>
TensorView written_view(Given& given) { return get<name>(given).written_view(given.op, name); }
template <Text name, class Given>
TensorView dense_view(Given& given) { return get<name>(given).dense_view(given.op, name); }
template <Text name, class Given>
TensorView contiguous_view(Given& given) { return get<name>(given).contiguous_view(given.op, name); }
template <Text name, class Given>
std::vector<int64_t> integers(Given& given) {
  const std::vector<StableIValue> values = get<name>(given).values(given.op);
  return {values.begin(), values.end()};
}

// `like` is read for its shape and dtype alone.
constexpr bool is_differentiable(std::string_view name) { return name != "like"; }

// Autograd is handled above the kernels (python/lowbit/ops/derivatives.py). If recording of gradients is still on here,
// these tensors are not recorded, and their gradients would be missing without an error.
inline void refuse_gradients(std::string_view op, std::string_view name, const Tensor& tensor) {
  if (requires_grad(tensor.handle())) refuse_gradient(op, name);
}
inline void refuse_gradients(std::string_view op, std::string_view name, const List& list) {
  for (const StableIValue item : list.values(op))  // borrowed from the list
    if (requires_grad(reinterpret_cast<TensorHandle>(item))) refuse_gradient(op, name);
}

template <class Op>
void refuse_gradients(Arguments<Op>& given) {
  [&]<std::size_t... index>(std::index_sequence<index...>) {
    constexpr const auto& all = kArguments<Op>;
    const auto look = [&]<std::size_t at>() {
      if constexpr (all[at].type.starts_with("Tensor") && is_differentiable(all[at].name))
        refuse_gradients(given.op, all[at].name, given.template at<at>());
    };
    (look.template operator()<index>(), ...);
  }(std::make_index_sequence<kArguments<Op>.size()>());
}

inline void give(StableIValue* stack, Tensor&& result) { *stack = to_value(std::move(result)); }
inline void give(StableIValue* stack, List&& result) { *stack = to_value(std::move(result)); }
template <std::size_t count>
void give(StableIValue* stack, std::array<Tensor, count>&& results) {
  for (Tensor& result : results) *stack++ = to_value(std::move(result));
}

// The `run` of an op whose result is one tensor of its arguments; a row runs unless `read` is empty.
template <class Op, auto result, auto read = result>
struct Returns {
  static Tensor run(Arguments<Op>& given) {
    auto args = Op::args_of(given);
    Tensor tensor = Tensor::empty(given.op, args.*result);
    if ((args.*read).numel() > 0) lowbit::run(args);
    return tensor;
  }
};

// Returns the error of a call, or null.
template <class Op>
[[gnu::noinline]] const Error* run_on_stack(StableIValue* stack) {
  try {
    Arguments<Op> given(stack);
    if (loaded_symbols().grad_mode_is_enabled()) refuse_gradients(given);
    if constexpr (std::is_void_v<decltype(Op::run(given))>) Op::run(given);
    else give(stack, Op::run(given));
    return nullptr;
  } catch (const Error& error) {
    return kept_for_torch(error);
  }
}

template <class Op>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  if (const Error* const error = run_on_stack<Op>(stack)) throw_for_torch(*error);
}

template <class Op>
void check(std::span<const DescribedValue> values) {
  if constexpr (requires(Description<Op>& given) { Op::args_of(given); }) {
    Description<Op> given{values};
    Op::args_of(given);
  }
}

constexpr int results_of(std::string_view schema) {
  const std::string_view results = schema.substr(schema.rfind(") -> ") + 5);
  if (results.ends_with("[]")) return -1;
  return results == "()" ? 0 : static_cast<int>(std::count(results.begin(), results.end(), ',')) + 1;
}

template <class Op>
struct InC {
  static constexpr BoxedKernel kernel = boxed<Op>;
  static constexpr const auto& arguments = kArguments<Op>;
  static constexpr int results = results_of(Op::schema);
};

template <class Op>
RegisteredOp registered() {
  constexpr std::string_view schema = Op::schema;
  return {.name = schema.substr(0, schema.find('(')),
          .schema = Op::schema.text,
          .kernel = boxed<Op>,
          .arguments = kArguments<Op>,
          .check = check<Op>,
          .c_shim = c_shim<InC<Op>>(),
          .results = InC<Op>::results};
}

}  // namespace lowbit::torch
