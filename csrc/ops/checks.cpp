// SPDX-License-Identifier: Apache-2.0
#include "ops/checks.hpp"

#include <algorithm>
#include <cmath>

#include "core/error.hpp"

namespace lowbit {

using enum ErrorKind;

void check_dtype(std::string_view op, std::string_view name, const TensorView& tensor, DType wanted) {
  check(tensor.dtype == wanted, type, op, ": ", name, " must be ", name_of(wanted), ", got ", name_of(tensor.dtype));
}

void check_activation(std::string_view op, std::string_view name, const TensorView& tensor) {
  check(is_activation(tensor.dtype), type, op, ": ", name, " must be float32, bfloat16 or float16, got ",
        name_of(tensor.dtype));
}

void check_floating(std::string_view op, std::string_view name, const TensorView& tensor) {
  check(is_activation(tensor.dtype) || tensor.dtype == DType::float64, type, op, ": ", name,
        " must be float32, bfloat16, float16 or float64, got ", name_of(tensor.dtype));
}

void check_mask(std::string_view op, const TensorView& mask, std::initializer_list<int64_t> shape) {
  if (!mask) return;
  check(mask.dtype == DType::boolean || mask.dtype == DType::float64 || is_activation(mask.dtype), type, op,
        ": mask must be bool or floating, got ", name_of(mask.dtype));
  check_shape(op, "mask", mask, shape);
}

void check_shape(std::string_view op, std::string_view name, const TensorView& tensor, std::span<const int64_t> shape) {
  check(std::ranges::equal(shape, shape_text(tensor).sizes), value, op, ": ", name, " must have shape ",
        ShapeText{shape}, ", got ", shape_text(tensor));
}

void check_contiguous(std::string_view op, std::string_view name, const TensorView& tensor) {
  check(tensor.is_contiguous(), value, op, ": ", name, " must be contiguous, got strides ",
        ShapeText{{tensor.stride.data(), static_cast<std::size_t>(tensor.rank)}}, " of shape ", shape_text(tensor));
}

void check_dense_rows(std::string_view op, std::string_view name, const TensorView& tensor) {
  check(tensor.size(-1) <= 1 || tensor.stride[tensor.rank - 1] == 1 || tensor.numel() == 0, value, op, ": ", name,
        " must be dense in its last dimension, got stride ", tensor.stride[tensor.rank - 1]);
}

void check_tensor(std::string_view op, std::string_view name, const TensorView& tensor, DType dtype,
                  std::initializer_list<int64_t> shape) {
  check_dtype(op, name, tensor, dtype);
  check_shape(op, name, tensor, shape);
  check_contiguous(op, name, tensor);
}

void check_state(std::string_view op, const TensorView& state, std::initializer_list<int64_t> shape) {
  check(state.dtype == DType::float32 || state.dtype == DType::bfloat16, type, op,
        ": state must be float32 or bfloat16, got ", name_of(state.dtype));
  check_shape(op, "state", state, shape);
  check_contiguous(op, "state", state);
}

void check_tokens(std::string_view op, std::string_view name, const TensorView& tensor,
                  std::initializer_list<int64_t> shape) {
  check_activation(op, name, tensor);
  check_shape(op, name, tensor, shape);
  check_dense_rows(op, name, tensor);
}

void check_numbers(std::string_view op, std::string_view name, const TensorView& tensor, int64_t count) {
  if (!tensor) return;
  check_activation(op, name, tensor);
  check_shape(op, name, tensor, {count});
  check_contiguous(op, name, tensor);
}

void check_dt_limit(std::string_view op, double dt_min, double dt_max) {
  check(std::isfinite(dt_min) && dt_min >= 0, value, op, ": dt_min must be finite and at least 0, got ", dt_min);
  check(dt_max >= dt_min, value, op, ": dt_max must be at least dt_min = ", dt_min, ", got ", dt_max);
}

void check_cu_seqlens(std::string_view op, const TensorView& cu_seqlens, std::string_view name,
                      const TensorView& tokens, std::string_view wanted) {
  if (!cu_seqlens) return;
  check(cu_seqlens.dtype == DType::int32 || cu_seqlens.dtype == DType::int64, type, op,
        ": cu_seqlens must be int32 or int64, got ", name_of(cu_seqlens.dtype));
  check(cu_seqlens.rank == 1 && cu_seqlens.size(0) >= 1, value, op, ": cu_seqlens must have shape [N + 1], got ",
        shape_text(cu_seqlens));
  check_contiguous(op, "cu_seqlens", cu_seqlens);
  check(tokens.size(0) == 1, value, op, ": ", name, " must have shape ", wanted, " with cu_seqlens, got ",
        shape_text(tokens));
}

int64_t check_number(std::string_view op, std::string_view name, int64_t number, std::size_t count) {
  check(number >= 0 && number < static_cast<int64_t>(count), value, op, ": ", name, " must be 0..", count - 1, ", got ",
        name, "=", number);
  return number;
}

void check_groups(std::string_view op, int64_t heads, int64_t kv_heads) {
  check(heads == 0 || (kv_heads > 0 && heads % kv_heads == 0), value, op,
        ": the heads of query must be a multiple of those of key, got ", heads, " and ", kv_heads);
}

}  // namespace lowbit
