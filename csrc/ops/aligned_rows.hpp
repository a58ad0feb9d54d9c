// SPDX-License-Identifier: Apache-2.0
// Whether a device may load the rows of a tensor by several bytes at a time.
#pragma once

#include "core/tensor_view.hpp"

namespace lowbit {

// Rows [..., e] begin at multiples of `bytes`; the stride of a dimension of 1 is irrelevant.
inline bool has_aligned_rows(const TensorView& of, int64_t bytes) {
  bool aligned = reinterpret_cast<uintptr_t>(of.data) % static_cast<uintptr_t>(bytes) == 0;
  for (int d = 0; d + 1 < of.rank; d++)
    aligned &= of.size(d) <= 1 || of.stride[d] * static_cast<int64_t>(size_of(of.dtype)) % bytes == 0;
  return aligned || of.numel() == 0;
}

}  // namespace lowbit
