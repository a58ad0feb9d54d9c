// SPDX-License-Identifier: Apache-2.0
// Views of the operands of a program's steps, whose rows are tokens.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "core/error.hpp"
#include "ops/checks.hpp"
#include "ops/program_code.hpp"

namespace lowbit {

inline TensorView shaped(TensorView view, std::initializer_list<int64_t> shape) {  // dense
  view.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), view.shape.begin());
  int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; i--) view.stride[i] = std::exchange(stride, stride * view.shape[i]);
  return view;
}

inline TensorView with_columns(const TensorView& x, int64_t columns) {  // [..., columns], dense
  TensorView view{.dtype = x.dtype, .device = x.device, .rank = x.rank};
  int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; i--) {
    view.shape[i] = i == view.rank - 1 ? columns : x.shape[i];
    view.stride[i] = std::exchange(stride, stride * view.shape[i]);
  }
  return view;
}

inline TensorView as_rows(const TensorView& x) {  // [T, n]
  const int64_t n = x.rank >= 1 ? x.size(-1) : 0;
  check(n > 0, ErrorKind::value, "x must have shape [..., n], got ", shape_text(x));
  check_contiguous(kRunProgram, "x", x);
  return shaped(x, {x.numel() / n, n});
}

inline bool alike(const TensorView& a, const TensorView& b) {  // equal but for the address
  return a.dtype == b.dtype && a.device == b.device && a.rank == b.rank &&
         std::equal(a.shape.begin(), a.shape.begin() + a.rank, b.shape.begin()) &&
         std::equal(a.stride.begin(), a.stride.begin() + a.rank, b.stride.begin());
}

inline TensorView without_heads(const TensorView& x) {  // [B, T, H, n] as [B, T, H n]
  return shaped(x, {x.size(0), x.size(1), x.size(2) * x.size(3)});
}

inline bool not_given(const TensorView& view) { return view.rank == 1 && view.size(0) == 0; }

// The columns of x [B, T, n] from `column` on as heads [B, T, heads, size], each `step` columns behind the one before.
inline TensorView heads_of(std::string_view op, std::string_view name, const TensorView& x, int64_t column,
                           int64_t heads, int64_t size, int64_t step) {
  check(x.rank == 3 && heads >= 1 && size >= 1 && column >= 0 && column + (heads - 1) * step + size <= x.size(2),
        ErrorKind::value, op, ": ", name, " must have shape [B, T, n] with ", heads, " times ", size,
        " columns from ", column, " on, got ", shape_text(x));
  check_dense_rows(op, name, x);
  TensorView view = x;
  view.rank = 4;
  view.shape[2] = heads, view.shape[3] = size;
  view.stride[2] = step, view.stride[3] = 1;
  if (view.data) view.data = x.as<char>() + column * static_cast<int64_t>(size_of(x.dtype));
  return view;
}

inline TensorView heads_of(std::string_view op, std::string_view name, const TensorView& x, int64_t column,
                           int64_t heads, int64_t size) {
  return heads_of(op, name, x, column, heads, size, size);
}

// The same without heads: [B, T, count].
inline TensorView columns_of(std::string_view op, std::string_view name, const TensorView& x, int64_t column,
                             int64_t count) {
  TensorView view = heads_of(op, name, x, column, 1, count);
  view.rank = 3;
  view.shape[2] = count, view.stride[2] = 1;
  return view;
}

}  // namespace lowbit
