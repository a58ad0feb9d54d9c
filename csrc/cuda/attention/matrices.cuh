// SPDX-License-Identifier: Apache-2.0
// Rows in shared memory as factors of products of warpgroups (device/wgmma.cuh), and the ring that they pass through.
#pragma once

#include "cuda/attention/tile.cuh"
#include "cuda/device/barrier.cuh"
#include "cuda/device/wgmma.cuh"

namespace lowbit::cuda {

// Matrices are 16 bytes apart, so that 8 lanes that copy 128 bytes of a row write to all banks: H200 took 298 TFLOP/s
// with a matrix for 8 lanes, since a sector of 32 bytes of memory was read for each half of it.
template <int kRows, int kColumns>
struct SharedMatrices {
  static constexpr int kMatrixStep = 8 * 16 + 16, kRowsStep = kColumns / 8 * kMatrixStep;  // bytes
  alignas(16) uint16_t data[kRows / 8][kColumns / 8][kMatrixStep / 16][8];

  // By a warpgroup: `rows` of them, zeros behind. Eight lanes have a row.
  LOWBIT_INLINE void copy(const uint16_t* from, int64_t stride, int rows) {
    const int first = warp_of_cta() % 4 * 4 + lane_of_warp() / 8, piece = lane_of_warp() % 8;
    from += first * stride + piece * 8;
#pragma unroll
    for (int i = 0; i < kRows / 16; i++, from += 16 * stride)
#pragma unroll
      for (int j = 0; j < kColumns / 8; j += 8)
        if (j + 8 <= kColumns / 8 || j + piece < kColumns / 8)
          copy_async(data[first / 8 + 2 * i][j + piece][first % 8], from + j * 8, first + 16 * i < rows);
  }
  LOWBIT_INLINE const void* at(int row, int column) const { return data[row / 8][column / 8]; }
};

// Barriers of the stages of a ring, which a warpgroup fills and `warps` read.
template <int kStages>
struct RingBarriers {
  Barrier full[kStages], empty[kStages];  // of a stage: all is there; all warps are done with it

  LOWBIT_INLINE void set_up_all(int warps) {  // by all threads, before __syncthreads
    if (threadIdx.x >= kStages) return;
    set_up(full[threadIdx.x], 128), set_up(empty[threadIdx.x], warps);
    show_barriers();
  }
};
template <int kStages>
struct RingPlace {
  int stage = 0, phase = 0;
  LOWBIT_INLINE void go_on() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

// Scores to the first factor of a product.
template <DType dtype, int kScores>
LOWBIT_INLINE void round_scores(const float (&s)[1][kScores][4], uint32_t (&a)[kScores / 2][4]) {
#pragma unroll
  for (int k = 0; k < kScores / 2; k++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      a[k][i] = pair_of<dtype>(s[0][2 * k + i / 2][i % 2 * 2], s[0][2 * k + i / 2][i % 2 * 2 + 1]);
}

}  // namespace lowbit::cuda
