// SPDX-License-Identifier: Apache-2.0
// int8_pack: a float matrix as the packed weight of `linear` in format int8 with one scale per row, for a single
// product: the bytes of quantize with mapping symmetric_no_clipping_err, without its measurement of the error. The
// matrix or its transpose is contiguous. A row that contains inf or nan gets the scale nan.
#pragma once

#include "core/tensor_view.hpp"
#include "formats/format.hpp"
#include "ops/kernel.hpp"

namespace lowbit {

struct Int8PackArgs {
  Place place{};
  WeightSpec spec;
  TensorView weight;    // [n, k] float32, bfloat16 or float16; it or its transpose is contiguous
  TensorView packed{};  // uint8 [panels, panel_bytes], contiguous: written

  bool transposed() const { return !weight.is_contiguous(); }
};

// Whether the transpose of a matrix is contiguous.
inline bool in_columns(const TensorView& matrix) {
  return matrix.rank == 2 && matrix.stride[0] == 1 && matrix.stride[1] == matrix.shape[0];
}

// Checks all arguments but `packed`.
LOWBIT_API Int8PackArgs int8_pack_args(const TensorView& weight);
LOWBIT_API Call describe(const Int8PackArgs& args);

}  // namespace lowbit
