// SPDX-License-Identifier: Apache-2.0
// Few rows of float activations times a 2:4 weight (formats/int8_semi_sparse.hpp) as stored: as in semi_sparse.hpp, a
// look-up gives each code the one of 8 activations that its position selects. A look-up has 16 floats, so the 8 of a
// step are stored twice. inf and nan must be multiplied by the zero weights too: rows with them use fma.hpp.
#pragma once

#include "cpu/linear/fma.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// Whether rows 0 .. count of x are all finite.
LOWBIT_INLINE bool are_finite(const XView& view, const WeightSpec& spec, int64_t count) {
  const int64_t padded = spec.padded_k();
  const Scratch buffer(padded * static_cast<int64_t>(sizeof(float)));
  f32x16 zeros = set1(0.0f);  // 0 * inf is nan
  for (int64_t row = 0; row < count; row++) {
    const float* x = widen_row(view, row, padded, buffer.as<float>());
    for (int64_t k = 0; k < padded; k += 16) zeros = fma(load(x + k), set1(0.0f), zeros);
  }
  return sum(zeros) == 0.0f;
}

template <int kRows>
void semi_sparse_stream(const PackedWeight& weight, const float* values, int64_t stride, const Sink& sink,
                        int64_t panel) {
  using Codec = codec_of<Format::int8_semi_sparse>;
  constexpr int kSlots = Codec::slots_of_step, kLines = 12;  // as in semi_sparse_half
  const WeightSpec& spec = weight.spec;
  const PanelView view = view_panel(spec, weight.data, panel);
  Ahead next(spec, view, view.end, reads_in_streams());
  f32x16 result[kRows];
  for (f32x16& sums : result) sums = set1(0.0f);
  const int64_t steps = ceil_div(spec.k, Codec::k_of_step), group_steps = spec.group_k() / Codec::k_of_step;
  const uint8_t* tile = view.codes;
  for (int64_t g = 0, at = 0; at < steps; g++) {
    StreamSums<kRows> sums;
    for (const int64_t end = smaller(steps, at + group_steps); at < end; at += 2) {
      const int64_t in_tile = at % 8;
      if (in_tile == 0)
        for (int line = 0; line < kLines; line++) next.fetch(line);
      unroll<2>([&](auto odd) __attribute__((always_inline)) {
        const uint8_t *codes_at = tile + Codec::codes_at + (in_tile + odd) * 64, *positions_at = tile + odd * 64;
        const i32x16 codes = load_i32(reinterpret_cast<const int32_t*>(codes_at)),
                     positions = shift_right(load_i32(reinterpret_cast<const int32_t*>(positions_at)),
                                          set1(static_cast<int32_t>(in_tile)));
        const float* x = values + (at + odd) * 16;
        unroll<kSlots>([&](auto slot) __attribute__((always_inline)) {
          const f32x16 w = to_float(shift_right_signed<24>(shift_left<24 - 8 * slot>(codes)));
          const i32x16 position = bit_or(bit_and(shift_right<8 * slot>(positions), set1(int32_t{3})),
                                      set1(int32_t{slot / 2 * 4}));
          f32x16* chain = sums.chain[slot % StreamSums<kRows>::kChains];
#pragma GCC unroll 8
          for (int r = 0; r < kRows; r++) chain[r] = fma(w, lookup8(x + r * stride, position), chain[r]);
        });
      });
      if (in_tile == 6) next.advance(view, spec.tile_bytes()), tile += spec.tile_bytes();
    }
    const f32x16 w_scale = scale_of(view, g);
    next.fetch_group(view, g);
    for (int r = 0; r < kRows; r++) result[r] = fma(sums.total(r), w_scale, result[r]);
  }
  finish_tile(weight, sink, 0, kRows, panel, result, 1, nullptr);
}

// The family of micro-kernels for few rows, all of them finite.
struct SteppedRows {
  static constexpr int64_t kPass = kStreamRows;
  static constexpr PanelCut kCut{.at_once = 1};

  XView x;
  int64_t count, stride;
  float* values;  // [rows][padded_k / 8][2][8]

  SteppedRows(const XView& x, const WeightSpec& spec, int64_t count, Arena& arena)
      : x(x), count(count), stride(2 * spec.padded_k() + 16), values(arena.array<float>(count * stride)) {}

  int64_t pieces() const { return 1; }
  void prepare(const WeightSpec& spec, int64_t) const {
    constexpr int64_t kStep = codec_of<Format::int8_semi_sparse>::k_of_step;
    const int64_t padded = spec.padded_k();
    const Scratch buffer(padded * static_cast<int64_t>(sizeof(float)));
    for (int64_t row = 0; row < count; row++) {
      const float* from = widen_row(x, row, padded, buffer.as<float>());
      float* out = values + row * stride;
      for (int64_t k = 0; k < padded; k += kStep)
        for (int64_t i = 0; i < 2 * kStep; i++) out[2 * k + i] = from[k + i % kStep];
    }
  }

  RowBlocks blocks(const WeightSpec&) const { return {count, count}; }

  void multiply(const PackedWeight& weight, const Sink& sink, Span block, Span panels) const {
    for (int64_t panel = panels.begin; panel < panels.end; panel++)
      with_count<kStreamRows>(static_cast<int>(block.count()),
                              [&](auto kRows) { semi_sparse_stream<kRows>(weight, values, stride, sink, panel); });
  }
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
