// SPDX-License-Identifier: Apache-2.0
// A call as a tracer knows it: tensors without data, a list of values in the order of the schema. An op's `args_of`
// reads it as it reads the stack of a call (arguments.hpp), so that both are refused by the same checks.
#pragma once

#include <span>
#include <string_view>
#include <variant>
#include <vector>

#include "core/error.hpp"
#include "core/tensor_view.hpp"
#include "torch/symbols.hpp"

namespace lowbit::torch {

// How the stack holds an argument.
enum class Kind { tensor, optional_tensor, list, integer, number, boolean };

struct Argument {
  std::string_view name, type;  // "score_mod", "int[]"
  Kind kind;
};

DType dtype_named(std::string_view name);  // "float32"; other where it is none of ours

// Row by row on the CPU: the call itself checks the place of a tensor that is traced.
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
