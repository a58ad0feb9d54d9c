// SPDX-License-Identifier: Apache-2.0
// The ops as C functions. A .pt2 of AOTInductor that was compiled with aot_inductor.custom_ops_to_c_shims calls them
// without torch's dispatcher. The signature follows from the schema: CArgument for each argument, then a pointer to a
// handle for each result, or one (null) if there is none. Handles of arguments stay the caller's. A .pt2 finds a
// function by its schema (lowbit_c_shim), so that one compiled for another schema is refused.
#pragma once

#include <algorithm>
#include <bit>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "torch/ops.hpp"

namespace lowbit::torch {

template <Kind>
struct CArgument { using types = std::tuple<int64_t>; };
template <> struct CArgument<Kind::tensor> { using types = std::tuple<TensorHandle>; };
template <> struct CArgument<Kind::optional_tensor> { using types = std::tuple<const TensorHandle*>; };
template <> struct CArgument<Kind::list> { using types = std::tuple<const void*, int64_t>; };  // items and their count
template <> struct CArgument<Kind::number> { using types = std::tuple<double>; };
template <> struct CArgument<Kind::boolean> { using types = std::tuple<int32_t>; };

template <class Given>
StableIValue word_of(Given given) {
  if constexpr (std::is_pointer_v<Given>) return reinterpret_cast<StableIValue>(given);
  else if constexpr (std::is_same_v<Given, double>) return std::bit_cast<StableIValue>(given);
  else return static_cast<StableIValue>(given);
}

// A call with these words. Errors are printed to stderr, as by torch's own C functions.
Status call_in_c(BoxedKernel kernel, std::span<const Argument> arguments, int results,
                 const StableIValue* words) noexcept;

template <class Op, class Types>
struct TypedCall;
template <class Op, class... Types>
struct TypedCall<Op, std::tuple<Types...>> {
  static Status call(Types... given) {
    const StableIValue words[] = {word_of(given)...};
    return call_in_c(Op::kernel, Op::arguments, Op::results, words);
  }
};

// Op has `kernel`, `arguments` and the number of `results`, negative for a list.
template <class Op>
CShim c_shim() {
  if constexpr (Op::results >= 0) {
    using Types = decltype([]<std::size_t... argument, std::size_t... result>(
                               std::index_sequence<argument...>, std::index_sequence<result...>) {
      return std::tuple_cat(typename CArgument<Op::arguments[argument].kind>::types()...,
                            std::tuple<decltype(result, static_cast<TensorHandle*>(nullptr))>()...);
    }(std::make_index_sequence<Op::arguments.size()>(), std::make_index_sequence<std::max(Op::results, 1)>()));
    return reinterpret_cast<CShim>(&TypedCall<Op, Types>::call);
  } else {
    return nullptr;
  }
}

// The C++ declaration with which Inductor calls the op on the CPU; empty if it has no c_shim.
std::string c_declaration(const RegisteredOp& op);

}  // namespace lowbit::torch
