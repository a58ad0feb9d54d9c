// SPDX-License-Identifier: Apache-2.0
// Where the tokens, heads and numbers of recurrent ops lie.
#pragma once

#include "core/dtype.hpp"
#include "core/tensor_view.hpp"
#include "cpu/packed_sequences.hpp"
#include "ops/gated_delta_rule.hpp"

namespace lowbit::cpu {
namespace {

[[maybe_unused]] LOWBIT_INLINE float number_at(const TensorView& tensor, int64_t at) {
  if (tensor.dtype == DType::float32) return tensor.as<const float>()[at];
  const uint16_t half = tensor.as<const uint16_t>()[at];
  return tensor.dtype == DType::bfloat16 ? float_from_bfloat16(half) : float_from_float16(half);
}

// The place of token `token` of `head` in a tensor [B, T, H, ...], in elements.
LOWBIT_INLINE int64_t place_in(const TensorView& tensor, int64_t batch, int64_t token, int64_t head) {
  return batch * tensor.stride[0] + token * tensor.stride[1] + head * tensor.stride[2];
}

// The tokens of a sequence: begin .. end - 1 of an entry of the batch.
struct Sequence {
  int64_t batch, begin, end;
  template <class Args>
  LOWBIT_INLINE Sequence(const Args& args, int64_t n)
      : batch(args.cu_seqlens ? 0 : n), begin(args.cu_seqlens ? end_in(args.cu_seqlens, n) : 0),
        end(args.cu_seqlens ? end_in(args.cu_seqlens, n + 1) : args.tokens()) {}
};

}  // namespace
}  // namespace lowbit::cpu
