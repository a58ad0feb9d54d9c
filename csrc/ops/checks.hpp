// SPDX-License-Identifier: Apache-2.0
// Checks of one argument, for all ops. Errors name op and argument, and say what was wanted and what was given.
#pragma once

#include <initializer_list>
#include <span>
#include <string_view>

#include "core/tensor_view.hpp"

namespace lowbit {

void check_dtype(std::string_view op, std::string_view name, const TensorView& tensor, DType wanted);
void check_activation(std::string_view op, std::string_view name, const TensorView& tensor);  // one of three floats
void check_floating(std::string_view op, std::string_view name, const TensorView& tensor);    // one of these or float64
void check_mask(std::string_view op, const TensorView& mask, std::initializer_list<int64_t> shape);  // bool or floating
void check_shape(std::string_view op, std::string_view name, const TensorView& tensor, std::span<const int64_t> shape);
void check_contiguous(std::string_view op, std::string_view name, const TensorView& tensor);
void check_dense_rows(std::string_view op, std::string_view name, const TensorView& tensor);  // dense last dimension
// Checks dtype, shape and contiguity.
void check_tensor(std::string_view op, std::string_view name, const TensorView& tensor, DType dtype,
                  std::initializer_list<int64_t> shape);
// Checks shape and contiguity of a recurrent state, float32 or bfloat16.
void check_state(std::string_view op, const TensorView& state, std::initializer_list<int64_t> shape);
// Checks that it is one of three floats, shape and dense rows.
void check_tokens(std::string_view op, std::string_view name, const TensorView& tensor,
                  std::initializer_list<int64_t> shape);
// Checks dtype, shape and contiguity of one number for each head or channel, if they are given.
void check_numbers(std::string_view op, std::string_view name, const TensorView& tensor, int64_t count);
// Checks the least and the largest step of time of a state space model.
void check_dt_limit(std::string_view op, double dt_min, double dt_max);
// Checks dtype, rank and contiguity of the ends of packed sequences, and that `name`, a tensor of tokens, has B = 1;
// `wanted` is its shape in errors.
void check_cu_seqlens(std::string_view op, const TensorView& cu_seqlens, std::string_view name,
                      const TensorView& tokens, std::string_view wanted);
// Checks that the number is one of `count` enumerators, and returns it.
int64_t check_number(std::string_view op, std::string_view name, int64_t number, std::size_t count);
// Checks the head counts of query and key: each key head serves a group of query heads.
void check_groups(std::string_view op, int64_t heads, int64_t kv_heads);

inline void check_shape(std::string_view op, std::string_view name, const TensorView& tensor,
                        std::initializer_list<int64_t> shape) {
  check_shape(op, name, tensor, std::span(shape.begin(), shape.size()));
}

}  // namespace lowbit
