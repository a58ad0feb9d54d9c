// SPDX-License-Identifier: Apache-2.0
#include "torch/c_shim.hpp"

#include <cstdio>

#include "torch/boxed.hpp"
#include "torch/registration.hpp"

namespace lowbit::torch {
namespace {

constexpr std::string_view kCaller = "lowbit_c_shim";

template <class Item>
const Item* items(StableIValue word) { return reinterpret_cast<const Item*>(word); }

StableIValue owned(TensorHandle handle) { return to_value(Tensor::again(kCaller, handle)); }

StableIValue owned_list(std::string_view type, StableIValue word, std::size_t count) {
  List list = List::empty(kCaller, count);
  for (std::size_t i = 0; i < count; i++)
    list.push(kCaller, type.starts_with("Tensor") ? owned(items<TensorHandle>(word)[i])
                       : type.starts_with("bool") ? static_cast<StableIValue>(items<int32_t>(word)[i] != 0)
                                                  : static_cast<StableIValue>(items<int64_t>(word)[i]));
  return to_value(std::move(list));
}

// The stack entry of a boxed kernel for an argument; advances to the words of the next one.
StableIValue taken(const Argument& argument, const StableIValue*& words) {
  const StableIValue word = *words++;
  switch (argument.kind) {
    case Kind::tensor: return owned(reinterpret_cast<TensorHandle>(word));
    case Kind::optional_tensor:
      return word ? to_optional_value(kCaller, Tensor::again(kCaller, *items<TensorHandle>(word))) : 0;
    case Kind::list: return owned_list(argument.type, word, *words++);
    default: return word;
  }
}

std::string_view c_types(Kind kind) {
  switch (kind) {
    case Kind::tensor: return "AtenTensorHandle";
    case Kind::optional_tensor: return "const AtenTensorHandle*";
    case Kind::list: return "const void*, int64_t";
    case Kind::number: return "double";
    case Kind::boolean: return "int32_t";
    default: return "int64_t";
  }
}

Status refuse() { return 1; }  // fits every signature: in C the caller cleans up

}  // namespace

Status call_in_c(BoxedKernel kernel, std::span<const Argument> arguments, int results,
                 const StableIValue* words) noexcept {
  try {
    std::vector<StableIValue> stack;
    stack.reserve(arguments.size());
    for (const Argument& argument : arguments) stack.push_back(taken(argument, words));
    kernel(stack.data(), arguments.size(), static_cast<uint64_t>(results));
    for (int i = 0; i < results; i++) {
      auto* const result = reinterpret_cast<TensorHandle*>(words[i]);
      if (Tensor tensor = Tensor::take(stack[i]); result) *result = tensor.release();
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "lowbit: %s\n", error.what());
    return 1;
  }
}

std::string c_declaration(const RegisteredOp& op) {
  if (!op.c_shim) return "";
  std::string types;
  for (const Argument& argument : op.arguments) types += concat(types.empty() ? "" : ", ", c_types(argument.kind));
  for (int i = 0; i < std::max(op.results, 1); i++) types += ", AtenTensorHandle*";
  const std::string name = concat("aoti_torch_cpu_", op.name);
  return concat("AOTITorchError (*const ", name, ")(", types, ") = reinterpret_cast<decltype(", name,
                ")>(lowbit_c_shim(\"", op.schema, "\"))");
}

}  // namespace lowbit::torch

extern "C" lowbit::torch::CShim lowbit_c_shim(const char* schema) {
  std::string reason = "this lowbit has another schema: compile the .pt2 again";
  for (const lowbit::torch::RegisteredOp* op : lowbit::torch::all_ops())
    if (op->c_shim && std::string_view(op->schema) == schema && lowbit::torch::symbols(&reason)) return op->c_shim;
  std::fprintf(stderr, "lowbit: %s: %s\n", schema, reason.c_str());
  return reinterpret_cast<lowbit::torch::CShim>(lowbit::torch::refuse);
}
