// SPDX-License-Identifier: Apache-2.0
// A call as seen by a tracer: tensors without data, a list of values in schema order. An op's `args_of` reads it like
// the stack of a call (arguments.hpp), so that both pass the same checks.
#pragma once

#include <span>
#include <string_view>
#include <variant>
#include <vector>

#include "core/error.hpp"
#include "core/tensor_view.hpp"
#include "torch/symbols.hpp"

namespace lowbit::torch {

// The kinds of arguments on the stack.
enum class Kind { tensor, optional_tensor, list, integer, number, boolean };

struct Argument {
  std::string_view name, type;  // "score_mod", "int[]"
  Kind kind;
};

DType dtype_named(std::string_view name);  // "float32"; other: a foreign dtype

// Treated as contiguous and on the CPU: the real call checks devices.
struct DescribedTensor {
  bool given = false;
  DType dtype = DType::other;
  std::vector<int64_t> shape;

  TensorView view(std::string_view op, std::string_view name) const;
  TensorView written_view(std::string_view op, std::string_view name) const { return view(op, name); }
  TensorView dense_view(std::string_view op, std::string_view name) const { return view(op, name); }
  TensorView contiguous_view(std::string_view op, std::string_view name) const { return view(op, name); }
};

struct DescribedList {
  std::vector<int64_t> integers;
  std::vector<DescribedTensor> of_tensors;

  std::vector<StableIValue> values(std::string_view) const { return {integers.begin(), integers.end()}; }
  const std::vector<DescribedTensor>& tensors(std::string_view) const { return of_tensors; }
};

using DescribedValue = std::variant<DescribedTensor, DescribedList, int64_t, double, bool>;
using Check = void (*)(std::span<const DescribedValue> values);

}  // namespace lowbit::torch
