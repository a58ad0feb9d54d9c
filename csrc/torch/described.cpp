// SPDX-License-Identifier: Apache-2.0
#include "torch/described.hpp"

#include "torch/boxed.hpp"

namespace lowbit::torch {

DType dtype_named(std::string_view name) {
  int found = 0;
  while (found < static_cast<int>(DType::other) && name_of(static_cast<DType>(found)) != name) found++;
  return static_cast<DType>(found);
}

TensorView DescribedTensor::view(std::string_view op, std::string_view name) const {
  if (!given) return {};
  check_rank(op, name, static_cast<int64_t>(shape.size()));
  TensorView view = torch::contiguous_view({}, dtype, static_cast<int>(shape.size()), shape.data());
  alignas(16) static std::byte nothing[16];
  view.data = nothing;  // a view without data and of a foreign dtype counts as an absent argument
  return view;
}

}  // namespace lowbit::torch
