// SPDX-License-Identifier: Apache-2.0
// kv_quantize and kv_dequantize: one row per sub-group, in local memory.
#pragma once

#include "level_zero/decode/codes.hpp"

namespace lowbit::level_zero {

struct CodeRows {
  alignas(16) float rows[kSubGroups][kMaxCodes];
};

struct RowPlace {
  int64_t row;
  int b, h, l;
  bool is_there;
};
LOWBIT_INLINE RowPlace row_place(const KvCodesCall& call) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kSubGroups + threadIdx.x / kSubGroup,
                rows = static_cast<int64_t>(call.batch) * call.heads * call.length;
  return {row, static_cast<int>(row / call.length / call.heads), static_cast<int>(row / call.length % call.heads),
          static_cast<int>(row % call.length), row < rows};
}

LOWBIT_INLINE float stored_scale(const KvCodesCall& call, int64_t at, float scale, bool writes) {
  const KvRows& to = call.codes;
  if (writes) store_real(to.scales.data, to.scale_dtype, at, scale);
  return to.scale_dtype == DType::float32 ? scale : gpu::float_of_half(half_of_float(scale));
}

LOWBIT_INLINE int code_of(float x, float inverse, float low, float high) {
  const float scaled = x * inverse;
  return __float2int_rn(scaled != scaled ? low : scaled < low ? low : scaled > high ? high : scaled);
}
LOWBIT_INLINE float inverse_of(float scale) { return scale != 0 && scale == scale ? 1.0f / scale : 0.0f; }

// The element of largest magnitude over all lanes, with its sign; nan if any element is nan or inf.
struct Extreme {
  float high = 0, low = 0, poison = 0;

  LOWBIT_INLINE void add(float x) {
    high = larger_of(high, x), low = larger_of(low, -x), poison = __fmaf_rn(x, 0.0f, poison);
  }
  LOWBIT_INLINE float value() const {
    const float top = largest_of_lanes(high), bottom = largest_of_lanes(low);
    return (top >= bottom ? top : -bottom) + sum_of_lanes(poison);
  }
};

LOWBIT_INLINE void quantize_int8(const KvCodesCall& call, const RowPlace& at, const float* row, int lane) {
  Extreme extreme;
  for (int column = lane; column < call.codes.padded; column += kSubGroup) extreme.add(row[column]);
  const float found = extreme.value();
  if (!at.is_there) return;
  const float scale = stored_scale(call, row_at(call.codes.scales, at.b, at.h, at.l),
                                   __fdiv_rn(found < 0 ? -found : found, 127.0f), lane == 0);
  auto* to = static_cast<int8_t*>(call.codes.rows.data) + row_at(call.codes.rows, at.b, at.h, at.l);
  for (int column = lane; column < call.codes.padded; column += kSubGroup)
    to[column] = static_cast<int8_t>(code_of(row[column], inverse_of(scale), -127.0f, 127.0f));
}

LOWBIT_INLINE void quantize_int4(const KvCodesCall& call, const RowPlace& at, const float* row, int lane) {
  for (int group = 0; group < call.codes.padded / kCodeGroup; group++) {
    const float low = row[group * kCodeGroup + lane], high = row[group * kCodeGroup + lane + 16];
    Extreme extreme;
    extreme.add(low), extreme.add(high);
    const float found = extreme.value();  // becomes -8, the level without an opposite
    if (!at.is_there) continue;
    const float scale = stored_scale(call, row_at(call.codes.scales, at.b, at.h, at.l) + group,
                                     __fdiv_rn(found, -8.0f), lane == 0), inverse = inverse_of(scale);
    auto* to = static_cast<uint8_t*>(call.codes.rows.data) + row_at(call.codes.rows, at.b, at.h, at.l);
    to[group * 16 + lane] = static_cast<uint8_t>((code_of(low, inverse, -8.0f, 7.0f) + 8) |
                                                 (code_of(high, inverse, -8.0f, 7.0f) + 8) << 4);
  }
}

LOWBIT_INLINE void kv_quantize(const KvCodesCall& call) {
  LOWBIT_SHARED(CodeRows, shared, );
  const auto thread = static_cast<int>(threadIdx.x), lane = thread % kSubGroup;
  const RowPlace at = row_place(call);
  float* row = shared.rows[thread / kSubGroup];
  const int64_t from = row_at(call.x, at.b, at.h, at.l);
  for (int column = lane; column < call.codes.padded; column += kSubGroup)
    row[column] = at.is_there && column < call.codes.columns ? load_real(call.x.data, call.dtype, from + column) : 0.0f;
  __syncthreads();
  if (call.rotation) rotate(shared.rows, call.codes.padded, call.rotation, thread);
  if (call.codes.kind == KvKind::int8) quantize_int8(call, at, row, lane);
  else quantize_int4(call, at, row, lane);
}

LOWBIT_INLINE void kv_dequantize(const KvCodesCall& call) {
  LOWBIT_SHARED(CodeRows, shared, );
  const auto thread = static_cast<int>(threadIdx.x), lane = thread % kSubGroup;
  const RowPlace at = row_place(call);
  float* row = shared.rows[thread / kSubGroup];
  for (int word = lane; at.is_there && word < words_of(call.codes); word += kSubGroup)
    decode_word(call.codes, at.b, at.h, at.l, word, [=](int column, float value) { row[column] = value; });
  __syncthreads();
  if (call.rotation) rotate(shared.rows, call.codes.padded, call.rotation, thread);
  const int64_t to = row_at(call.x, at.b, at.h, at.l);
  for (int column = lane; at.is_there && column < call.codes.columns; column += kSubGroup)
    store_real(call.x.data, call.dtype, to + column, row[column]);
}

}  // namespace lowbit::level_zero
