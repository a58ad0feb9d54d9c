// SPDX-License-Identifier: Apache-2.0
// Channels of tokens: a vector is 16 neighbouring channels at one time, as they lie in memory.
#pragma once

#include "core/tensor_view.hpp"
#include "cpu/vector_io.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// Vectors of [B, T, D]: up to 16 channels from `channel` on, at a token.
struct Rows {
  const TensorView& tensor;
  int64_t at, step, count;
  LOWBIT_INLINE Rows(const TensorView& tensor, int64_t batch, int64_t channel, int64_t count)
      : tensor(tensor), at(batch * tensor.stride[0] + channel), step(tensor.stride[1]), count(count) {}
  LOWBIT_INLINE Rows(const TensorView& tensor, int64_t batch, int64_t channel)
      : Rows(tensor, batch, channel, tensor.size(2) - channel) {}
  LOWBIT_INLINE f32x16 load(int64_t token) const {
    return load_as_float(tensor.data, tensor.dtype, at + token * step, count);
  }
  LOWBIT_INLINE void store(int64_t token, f32x16 value) const {
    store_from_float(tensor.data, tensor.dtype, at + token * step, count, value);
  }
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
