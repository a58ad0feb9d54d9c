// SPDX-License-Identifier: Apache-2.0
// What causal_conv1d and its gradient share: a vector is 16 neighbouring channels at one time. Inputs lie like that in
// memory; taps and states, whose channels are rows, are transposed into lanes once per task.
#pragma once

#include "cpu/loops.hpp"
#include "cpu/recurrent/channel_rows.hpp"
#include "cpu/recurrent/sequences.hpp"
#include "cpu/simd/math.hpp"
#include "ops/causal_conv1d.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int kTaps = kMaxTaps;         // the largest number of taps, and of columns of a state
constexpr int64_t kSpan = 128;          // channels of a task at a time: rows of some cache lines
constexpr int kSpanBlocks = kSpan / 16;
constexpr int64_t kWalk = 16;           // tokens that a vector goes through before the next vector of the span
constexpr int64_t kTokenProducts = 32;  // products that an element takes as long as: most is silu
constexpr int64_t kStateProducts = 256; // .. and the transposition of a channel's taps and states

using Lanes = float[kTaps][16];  // a column of 16 channels per row

// Up to 16 channels from `at` on of a tensor whose last two dimensions are [D, columns]; lanes beyond them are 0.
LOWBIT_INLINE void load_lanes(const TensorView& tensor, int64_t at, int64_t count, int64_t columns, Lanes& lanes) {
  const int64_t channel = tensor.stride[tensor.rank - 2], column = tensor.stride[tensor.rank - 1];
  if (channel == 1) {
    for (int64_t i = 0; i < columns; i++)
      store(lanes[i], load_as_float(tensor.data, tensor.dtype, at + i * column, count));
  } else if (column == 1 && channel == columns && count >= 16) {
    alignas(64) float rows[16 * kTaps];
    for (int64_t i = 0; i < columns; i++)
      store(rows + 16 * i, load_as_float(tensor.data, tensor.dtype, at + 16 * i, 16));
    for (int64_t c = 0; c < 16; c++)
      for (int64_t i = 0; i < columns; i++) lanes[i][c] = rows[c * columns + i];
  } else {
    for (int64_t c = 0; c < 16; c++)
      for (int64_t i = 0; i < columns; i++)
        lanes[i][c] = c < count ? number_at(tensor, at + c * channel + i * column) : 0;
  }
}

// The same channels into a contiguous tensor.
LOWBIT_INLINE void store_lanes(const TensorView& tensor, int64_t at, int64_t count, int64_t columns,
                               const Lanes& lanes) {
  alignas(64) float rows[16 * kTaps];
  for (int64_t c = 0; c < 16; c++)
    for (int64_t i = 0; i < columns; i++) rows[c * columns + i] = lanes[i][c];
  const int64_t all = smaller(16, count) * columns;
  for (int64_t i = 0; i < all; i += 16)
    store_from_float(tensor.data, tensor.dtype, at + i, all - i, load(rows + i));
}

LOWBIT_INLINE void clear(Lanes& lanes) {
  for (int i = 0; i < kTaps; i++) store(lanes[i], set1(0.0f));
}

// Taps and bias of a span of channels, in float32.
struct SpanTaps {
  alignas(64) Lanes taps[kSpanBlocks];
  alignas(64) float bias[kSpanBlocks][16];

  SpanTaps(const CausalConv1dArgs& args, Span channels) {
    const TensorView &weight = args.weight, &given = args.bias;
    for (int64_t d = channels.begin, block = 0; d < channels.end; d += 16, block++) {
      const int64_t count = args.channels() - d;
      load_lanes(weight, d * weight.stride[0], count, args.taps(), taps[block]);
      store(bias[block], given ? load_as_float(given.data, given.dtype, d, count) : set1(0.0f));
    }
  }
};

// The state of a block of channels before a sequence: the last kept() inputs.
LOWBIT_INLINE void load_state(const CausalConv1dArgs& args, int64_t sequence, int64_t channel, Lanes& lanes) {
  const TensorView& state = args.state;
  if (!state) return clear(lanes);
  load_lanes(state, sequence * state.stride[0] + channel * state.stride[1], args.channels() - channel, args.kept(),
             lanes);
}

// The input at a token of a sequence, which may be one of the state before it.
LOWBIT_INLINE f32x16 input_at(const Rows& x, const Sequence& sequence, const Lanes& state, int64_t kept,
                              int64_t token) {
  return token >= sequence.begin ? x.load(token) : load(state[kept + token - sequence.begin]);
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
