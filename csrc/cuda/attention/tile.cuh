// SPDX-License-Identifier: Apache-2.0
// Tile operations of forward and backward: copies of rows to shared memory, products of tiles.
#pragma once

#include "cuda/attention/call.hpp"
#include "cuda/device/tiles.cuh"
#include "gpu/device/floats.cuh"
#include "gpu/device/vector.cuh"

namespace lowbit::cuda {

template <int kRows, int kColumns>
struct SharedRows {
  static constexpr int kStride = kColumns + kRowPad;
  alignas(16) uint16_t data[kRows * kStride];

  // `rows` rows, then zeros.
  LOWBIT_INLINE void copy(const uint16_t* from, int64_t stride, int rows) {
    constexpr int kPieces = kColumns / 8, kAtOnce = kAttentionThreads / kPieces;  // rows
    if constexpr (kAttentionThreads % kPieces == 0 && kRows % kAtOnce == 0) {
      int row = static_cast<int>(threadIdx.x) / kPieces;
      const int piece = static_cast<int>(threadIdx.x) % kPieces;
      uint16_t* to = data + row * kStride + piece * 8;
      from += row * stride + piece * 8;
#pragma unroll
      for (int i = 0; i < kRows / kAtOnce; i++) {
        copy_async(to + i * kAtOnce * kStride, from, row < rows);
        row += kAtOnce, from += kAtOnce * stride;
      }
    } else {
#pragma unroll 1  // unrolled, the addresses of all pieces would stay in registers
      for (int first = 0; first < kRows * kPieces; first += kAttentionThreads) {
        const int at = first + static_cast<int>(threadIdx.x), row = at / kPieces, piece = at % kPieces;
        if (kRows * kPieces % kAttentionThreads && at >= kRows * kPieces) break;
        copy_async(data + row * kStride + piece * 8, from + (row < rows ? row * stride : 0) + piece * 8, row < rows);
      }
    }
  }
};

LOWBIT_INLINE int lane_of_warp() { return static_cast<int>(threadIdx.x) % 32; }
LOWBIT_INLINE int warp_of_cta() { return static_cast<int>(threadIdx.x) / 32; }

template <int kM, int kColumns>
LOWBIT_INLINE void clear(float (&c)[kM][kColumns][4]) {
#pragma unroll
  for (int m = 0; m < kM; m++)
#pragma unroll
    for (int n = 0; n < kColumns; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) c[m][n][i] = 0;
}

template <int kStride>
LOWBIT_INLINE void load_rows(uint32_t (&a)[4], const uint16_t* rows, int k) {
  const int lane = lane_of_warp();
  load_matrices(a, rows + lane % 16 * kStride + k + lane / 16 * 8);
}

// c += a b^T for one step of 16 k; a: kM times 16 rows, b: 16 kPairs rows in shared memory.
template <DType dtype, int kStride, int kM, int kColumns>
LOWBIT_INLINE void multiply_step(float (&c)[kM][kColumns][4], const uint32_t (&a)[kM][4], const uint16_t* b, int k) {
  const int lane = lane_of_warp();
#pragma unroll
  for (int n = 0; n < kColumns; n += 2) {
    uint32_t of_b[4];
    load_matrices(of_b, b + (n * 8 + lane % 8 + lane / 16 * 8) * kStride + k + lane / 8 % 2 * 8);
#pragma unroll
    for (int m = 0; m < kM; m++) {
      multiply_16<dtype>(c[m][n], a[m], {of_b[0], of_b[1]});
      multiply_16<dtype>(c[m][n + 1], a[m], {of_b[2], of_b[3]});
    }
  }
}

// c = a b^T, both in shared memory, over kK columns; a: the first row of this warp. With one tile of rows, two steps at
// a time: otherwise NVRTC 13.0 hoists all loads, and the backward with head dim 128 spilled 84 bytes and took 232
// registers instead of 155.
template <DType dtype, int kK, int kM, int kColumns>
LOWBIT_INLINE void multiply_rows(float (&c)[kM][kColumns][4], const uint16_t* a, const uint16_t* b) {
  constexpr int kStride = kK + kRowPad, kUnroll = kM == 1 ? 2 : kK / 16;
#pragma unroll kUnroll
  for (int k = 0; k < kK; k += 16) {
    uint32_t of_a[kM][4];
#pragma unroll
    for (int m = 0; m < kM; m++) load_rows<kStride>(of_a[m], a + m * 16 * kStride, k);
    multiply_step<dtype, kStride>(c, of_a, b, k);
  }
}

// Rows of a warp in shared memory as the left factor; read once if kKeeps.
template <DType dtype, int kK, int kM, bool kKeeps>
struct LeftRows {
  const uint16_t* rows;
  uint32_t kept[kKeeps ? kK / 16 : 1][kM][4];

  LOWBIT_INLINE void load() {
    if constexpr (kKeeps)
#pragma unroll
      for (int k = 0; k < kK / 16; k++)
#pragma unroll
        for (int m = 0; m < kM; m++) load_rows<kK + kRowPad>(kept[k][m], rows + m * 16 * (kK + kRowPad), k * 16);
  }
  template <int kColumns>
  LOWBIT_INLINE void multiply(float (&c)[kM][kColumns][4], const uint16_t* b) const {
    clear(c);
    if constexpr (!kKeeps) multiply_rows<dtype, kK>(c, rows, b);
    else
#pragma unroll
      for (int k = 0; k < kK / 16; k++) multiply_step<dtype, kK + kRowPad>(c, kept[k], b, k * 16);
  }
};

// c += a b; a: scores in registers, b: rows in shared memory, from a column on, with `pairs` pairs of 16 columns.
template <DType dtype, int kStride, int kM, int kScores, int kColumns>
LOWBIT_INLINE void multiply_onto(float (&c)[kM][kColumns][4], const float (&a)[kM][kScores][4], const uint16_t* b,
                                 int pairs) {
  const int lane = lane_of_warp();
#pragma unroll
  for (int k = 0; k < kScores; k += 2) {
    uint32_t of_a[kM][4];
#pragma unroll
    for (int m = 0; m < kM; m++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        of_a[m][i] = pair_of<dtype>(a[m][k + i / 2][i % 2 * 2], a[m][k + i / 2][i % 2 * 2 + 1]);
#pragma unroll
    for (int n = 0; n < kColumns; n += 2) {
      if (n / 2 >= pairs) break;
      uint32_t of_b[4];
      load_transposed(of_b, b + (k * 8 + lane % 16) * kStride + n * 8 + lane / 16 * 8);
#pragma unroll
      for (int m = 0; m < kM; m++) {
        multiply_16<dtype>(c[m][n], of_a[m], {of_b[0], of_b[1]});
        multiply_16<dtype>(c[m][n + 1], of_a[m], {of_b[2], of_b[3]});
      }
    }
  }
}

LOWBIT_INLINE const uint16_t* head_rows(const HeadRows& rows, int b, int h) {
  return static_cast<const uint16_t*>(rows.data) + b * rows.batch + h * rows.head;
}

// Two adjacent elements of a row of out or a gradient.
template <DType dtype>
LOWBIT_INLINE void store_pair(const HeadRows& rows, DType stored, int b, int h, int row, int column, float low,
                              float high) {
  const int64_t at = b * rows.batch + h * rows.head + row * rows.row + column;
  if (stored == DType::float32) {
    *reinterpret_cast<uint2*>(static_cast<float*>(rows.data) + at) = {__float_as_uint(low), __float_as_uint(high)};
  } else {
    *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(rows.data) + at) = pair_of<dtype>(low, high);
  }
}

}  // namespace lowbit::cuda
