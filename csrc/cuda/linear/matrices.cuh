// SPDX-License-Identifier: Apache-2.0
// Reorders activations for warpgroup products (device/wgmma.cuh): matrices of 8 rows x 16 bytes. For each 16 k of a
// row, k 0, 2 ... 14 are in one matrix, and k 1, 3 ... 15 in the next. (int8 codes for products of codes stay in order:
// quantize_rows of gpu/linear/activations.cuh.)
#pragma once

#include "gpu/linear/activations.cuh"

namespace lowbit::cuda {

LOWBIT_INLINE void order_matrices(const LinearCall& call) {
  const auto chunks = static_cast<uint32_t>(call.tiles * kChunks),
             at = static_cast<uint32_t>(blockIdx.x) * kLinearThreads + threadIdx.x;
  const int64_t row = at / chunks, chunk = at % chunks;
  if (row >= call.m) return;
  uint32_t words[8];
  const auto* x = static_cast<const uint16_t*>(call.x) + row * call.spec.k + chunk * 16;
  if (reinterpret_cast<std::size_t>(call.x) % 16 == 0 && call.spec.k % 16 == 0) {
    const uint4 first = chunk * 16 < call.spec.k ? *reinterpret_cast<const uint4*>(x) : uint4{},
                second = chunk * 16 < call.spec.k ? *reinterpret_cast<const uint4*>(x + 8) : uint4{};
    words[0] = first.x, words[1] = first.y, words[2] = first.z, words[3] = first.w;
    words[4] = second.x, words[5] = second.y, words[6] = second.z, words[7] = second.w;
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const auto of = [&](int k) { return chunk * 16 + k < call.spec.k ? uint32_t{x[k]} : 0u; };
      words[i] = of(2 * i) | of(2 * i + 1) << 16;
    }
  }
  uint32_t halves[2][4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    halves[0][i] = __byte_perm(words[2 * i], words[2 * i + 1], 0x5410);
    halves[1][i] = __byte_perm(words[2 * i], words[2 * i + 1], 0x7632);
  }
  auto* to = static_cast<uint4*>(call.ordered) + matrices_of(call, row, chunk / kChunks) * 2 * kRowsAtOnce * kChunks +
             chunk % kChunks * 2 * kRowsAtOnce + row % kRowsAtOnce;
  to[0] = {halves[0][0], halves[0][1], halves[0][2], halves[0][3]};
  to[kRowsAtOnce] = {halves[1][0], halves[1][1], halves[1][2], halves[1][3]};
}

// int8 codes as float16, for weights with scales per group. If groups of activations have scales, codes are multiplied
// by their scale divided by the largest, which becomes the scale of the row, and rounded once to 11 bits.
LOWBIT_INLINE void order_codes(const LinearCall& call) {
  LOWBIT_SHARED(int32_t, warps, [kLinearWarps]);
  const WeightSpec& spec = call.spec;
  const int64_t row = blockIdx.x / static_cast<unsigned>(call.ctas_of_row),
                part_of_row = blockIdx.x % static_cast<unsigned>(call.ctas_of_row), padded = call.tiles * kTileK;
  const bool per_row = call.x_format != XFormat::int8_group || spec.group_size == 0;
  const Range of_row = range_of_row(call, row, warps);
  if (threadIdx.x == 0) call.row_scale[row] = of_row.scale, call.row_offset[row] = -of_row.scale * of_row.zero_point;
  // A warp processes the 32 words of one large group at a time, or of several small ones.
  const int64_t span = larger(per_row ? 0 : spec.group_size, 128), lane = threadIdx.x % 32;
  for (int64_t begin = (part_of_row * kLinearWarps + threadIdx.x / 32) * span; begin < padded;
       begin += call.ctas_of_row * kLinearWarps * span) {
    const int64_t end = smaller(begin + span, padded);
    Range range = of_row;
    float factor = 1.0f;
    if (!per_row) {
      int32_t most = largest_of_words(call, row, begin / 4 + lane, end / 4, 32);
      for (int apart = 1; apart < 32 && apart * 4 < spec.group_size; apart *= 2)
        most = Largest{}(most, __shfl_xor_sync(kWarp, most, apart));
      range = Range::symmetric(most, 127.0f);
      factor = of_row.scale > 0.0f ? __fdiv_rn(range.scale, of_row.scale) : 0.0f;  // nan, like the scale of the row
    }
    for (int64_t word = begin / 4 + lane; word < end / 4; word += 32) {
      float x[4];
      load_word(call, row, word, x);
      const auto codes = static_cast<int32_t>(codes_of(call, word, x, range).codes);
      const auto value = [&](int i) { return static_cast<float>(codes << (24 - 8 * i) >> 24) * factor; };
      auto* to = static_cast<uint32_t*>(call.ordered) + matrices_of(call, row, word / 16) * 256 + word % 16 / 4 * 64 +
                 row % kRowsAtOnce * 4 + word % 4;
      to[0] = pair_of_f16(value(0), value(2)), to[32] = pair_of_f16(value(1), value(3));
    }
  }
}

}  // namespace lowbit::cuda
