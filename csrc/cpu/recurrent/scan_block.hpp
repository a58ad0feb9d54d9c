// SPDX-License-Identifier: Apache-2.0
// What selective_scan and its gradient share: a block of 16 neighbouring channels, whose numbers are the lanes of
// vectors as they lie in memory. Its states are rows of a matrix [S, 16], so that a token needs no sum over lanes. Two
// thirds of the work are the exponential of delta A.
#pragma once

#include "cpu/loops.hpp"
#include "cpu/recurrent/channel_rows.hpp"
#include "cpu/recurrent/sequences.hpp"
#include "cpu/recurrent/time_steps.hpp"
#include "cpu/recurrent/state_rows.hpp"
#include "ops/selective_scan.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kScanBlocks = 8;     // blocks of a task at a time: rows of some cache lines
constexpr int64_t kScanProducts = 16;  // products that a number of a state takes as long as for a token: most are exp2

// 2^x for x <= 0; at least 2^-126, and 1 for x = 0. The largest relative error is 2e-7.
LOWBIT_INLINE f32x16 exp2_of_decay(f32x16 x) {
  x = max(set1(-126.0f), x);  // this operand order keeps nan
  const i32x16 i = to_int(x);
  const f32x16 r = sub(x, to_float(i));
  f32x16 p = set1(1.3264727e-3f);
  p = fma(p, r, set1(9.6715130e-3f));
  p = fma(p, r, set1(5.5507336e-2f));
  p = fma(p, r, set1(2.4022242e-1f));
  p = fma(p, r, set1(6.9314700e-1f));
  p = fma(p, r, set1(1.0f));
  return times_power_of_two(p, i);
}

// log2(e) A, finite, so that a delta of 0 is no decay.
LOWBIT_INLINE f32x16 log2_rate(f32x16 a) { return max(set1(-0x1.fffffep127f), mul(a, set1(0x1.715476p0f))); }

// Numbers of a block that do not change with the tokens.
struct ScanBlock {
  int64_t channel, count;  // the first channel, and how many
  Matrix<float> rate;      // log2(e) A [S, 16]
  alignas(64) float d[16], bias[16];

  ScanBlock(const SelectiveScanArgs& args, int64_t channel, int64_t count, Matrix<float> rate)
      : channel(channel), count(count), rate(rate) {
    const int64_t s = args.s();
    load_turned(args.a, channel * s, count, s, rate);
    for (int64_t i = 0; i < s; i++) store(rate.row(i), log2_rate(load(rate.row(i))));
    const auto put = [&](float* to, const TensorView& from) {
      store(to, from ? load_as_float(from.data, from.dtype, channel, count) : set1(0.0f));
    };
    put(d, args.d), put(bias, args.dt_bias);
  }

  LOWBIT_INLINE Rows rows(const TensorView& tensor, int64_t batch) const { return {tensor, batch, channel, count}; }
};

// B and C of a few tokens of a group, in float32.
struct ScanTokens {
  Matrix<float> b, c;  // [tokens, S]

  ScanTokens(TileArena& arena, int64_t tokens, int64_t s)
      : b(arena.matrix<float>(tokens, s)), c(arena.matrix<float>(tokens, s)) {}

  void load(const SelectiveScanArgs& args, int64_t batch, Span tokens, int64_t group) {
    for (int64_t token = tokens.begin; token < tokens.end; token++) {
      load_row(args.b, place_in(args.b, batch, token, group), args.s(), b.row(token - tokens.begin));
      load_row(args.c, place_in(args.c, batch, token, group), args.s(), c.row(token - tokens.begin));
    }
  }
};

// The blocks of a group of channels; the last one may have fewer channels.
struct GroupBlocks {
  int64_t channels, count;  // of a group
  explicit GroupBlocks(const SelectiveScanArgs& args)
      : channels(args.channels() / args.groups()), count(ceil_div(channels, 16)) {}
  LOWBIT_INLINE ScanBlock block(const SelectiveScanArgs& args, int64_t group, int64_t number,
                                Matrix<float> rate) const {
    return {args, group * channels + number * 16, smaller(16, channels - number * 16), rate};
  }
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
