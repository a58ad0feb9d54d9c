// SPDX-License-Identifier: Apache-2.0
// Rows in shared memory as factors of warpgroup products (device/wgmma.cuh), and the ring that they pass through.
#pragma once

#include "cuda/attention/tile.cuh"
#include "cuda/device/barrier.cuh"
#include "cuda/device/wgmma.cuh"

namespace lowbit::cuda {

// Eight lanes copy 128 contiguous bytes of a row to 128 contiguous bytes. With matrices of 8 rows x 16 bytes instead,
// the forward with head dim 128 was limited to 290 TFLOP/s on an H200 by L2, at 85 % of its request rate
// (device/tiles.cuh); this way it reaches 600.
template <int kRows, int kColumns>
struct SharedLines {
  static constexpr int kPanels = (kColumns + 63) / 64, kPanelStep = kRows * 128;
  alignas(1024) uint16_t data[kPanels][kRows][8][8];

  // By a warpgroup: `rows` rows, then zeros.
  LOWBIT_INLINE void copy(const uint16_t* from, int64_t stride, int rows) {
    const int first = warp_of_cta() % 4 * 4 + lane_of_warp() / 8, piece = lane_of_warp() % 8;
    from += first * stride + piece * 8;
#pragma unroll
    for (int i = 0; i < kRows / 16; i++, from += 16 * stride)
#pragma unroll
      for (int panel = 0; panel < kPanels; panel++)
        if (panel * 64 + 64 <= kColumns || panel * 64 + piece * 8 < kColumns)
          copy_async(data[panel][first + 16 * i][piece ^ first % 8], from + panel * 64, first + 16 * i < rows);
  }
  LOWBIT_INLINE const void* at(int row, int column) const { return data[column / 64][row][column % 64 / 8]; }
};

// Barriers of the stages of a ring, which a warpgroup fills and `warps` warps read.
template <int kStages>
struct RingBarriers {
  Barrier full[kStages], empty[kStages];  // per stage: its data has arrived; all warps are done with it

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

// Converts scores to the first factor of a product.
template <DType dtype, int kScores>
LOWBIT_INLINE void round_scores(const float (&s)[1][kScores][4], uint32_t (&a)[kScores / 2][4]) {
#pragma unroll
  for (int k = 0; k < kScores / 2; k++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      a[k][i] = pair_of<dtype>(s[0][2 * k + i / 2][i % 2 * 2], s[0][2 * k + i / 2][i % 2 * 2 + 1]);
}

}  // namespace lowbit::cuda
