// SPDX-License-Identifier: Apache-2.0
// Sequences that are packed into one row of tokens: sequence n is tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1.
#pragma once

#include <string_view>

#include "core/tensor_view.hpp"

namespace lowbit::cpu {
namespace {

// Where sequence n begins, or after the last sequence the end.
[[maybe_unused]] LOWBIT_INLINE int64_t end_in(const TensorView& cu_seqlens, int64_t n) {
  return cu_seqlens.dtype == DType::int32 ? cu_seqlens.as<const int32_t>()[n] : cu_seqlens.as<const int64_t>()[n];
}

}  // namespace

// cu_seqlens, if given, must rise from 0 to the number of tokens of `name`. Found before a row writes anything.
void refuse_bad_lengths(std::string_view op, const TensorView& cu_seqlens, std::string_view name, int64_t tokens);

}  // namespace lowbit::cpu
