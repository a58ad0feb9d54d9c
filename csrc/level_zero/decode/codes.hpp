// SPDX-License-Identifier: Apache-2.0
// Reads keys and values as stored (ops/decode.hpp), by dwords: four columns of int8, or four columns of int4 and the
// four that are 16 columns further. Also the rotation of rows in local memory.
#pragma once

#include "level_zero/attention/running.hpp"
#include "level_zero/decode/call.hpp"

namespace lowbit::level_zero {

constexpr int kCodeGroup = 32;  // kKvGroup: elements per int4 scale

LOWBIT_INLINE int words_of(const KvRows& of) { return of.kind == KvKind::int4 ? of.padded / 8 : of.padded / 4; }

LOWBIT_INLINE int64_t row_at(const gpu::HeadRows& rows, int b, int h, int64_t row) {
  return b * rows.batch + h * rows.head + row * rows.row;
}

// Calls to(column, value) for the columns of one dword of a row.
template <class To>
LOWBIT_INLINE void decode_word(const KvRows& of, int b, int h, int64_t row, int word, To to) {
  const auto* bytes = static_cast<const uint8_t*>(of.rows.data) + row_at(of.rows, b, h, row);
  const uint32_t codes = global<uint32_t>(bytes)[word];
  const int64_t scales = row_at(of.scales, b, h, row);
  if (of.kind == KvKind::int8) {
    const float scale = load_real(of.scales.data, of.scale_dtype, scales);
#pragma unroll
    for (int i = 0; i < 4; i++) to(word * 4 + i, static_cast<float>(static_cast<int8_t>(codes >> 8 * i)) * scale);
    return;
  }
  const int group = word / 4, first = group * kCodeGroup + word % 4 * 4;
  const float scale = load_real(of.scales.data, of.scale_dtype, scales + group);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t code = codes >> 8 * i & 0xff;
    to(first + i, static_cast<float>(static_cast<int>(code & 15) - 8) * scale);
    to(first + i + 16, static_cast<float>(static_cast<int>(code >> 4) - 8) * scale);
  }
}

// Multiplies `rows` rows in local memory by the normalized Hadamard matrix of `size`, its own inverse. By all threads.
template <int kRows, int kColumns>
LOWBIT_INLINE void rotate(float (&rows)[kRows][kColumns], int columns, int size, int thread) {
  const float norm = 1.0f / __fsqrt_rn(static_cast<float>(size));
  for (int half = 1; half < size; half *= 2) {
    const float factor = half == 1 ? norm : 1.0f;
    for (int at = thread; at < kRows * columns / 2; at += kAttentionThreads) {
      const int pair = at % (columns / 2), column = pair / half * 2 * half + pair % half;
      float* row = rows[at / (columns / 2)];
      const float a = row[column] * factor, b = row[column + half] * factor;
      row[column] = a + b, row[column + half] = a - b;
    }
    __syncthreads();
  }
}

}  // namespace lowbit::level_zero
