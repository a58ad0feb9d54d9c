// SPDX-License-Identifier: Apache-2.0
#include "onednn/operands.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <vector>

#include "core/bits.hpp"
#include "core/parallel.hpp"

namespace lowbit::onednn {
namespace {

// The largest |x| by its bits, which are in the order of the values; those of inf and nan are the largest.
float largest(const float* x, int64_t k) {
  int32_t bits = 0;
  for (int64_t i = 0; i < k; i++) bits = std::max(bits, std::bit_cast<int32_t>(x[i]) & 0x7fffffff);
  return std::bit_cast<float>(bits);
}

// Adding 1.5 * 2^23 rounds to the nearest integer, which is in the low bits then. Of nan: some code, its scale is nan.
int8_t nearest(float value) {
  constexpr float kRound = 0x1.8p23f;
  const float bounded = std::max(-127.0f, std::min(127.0f, value));
  return static_cast<int8_t>(std::bit_cast<int32_t>(bounded + kRound) - std::bit_cast<int32_t>(kRound));
}

float quantize(const float* x, int64_t k, int8_t* codes) {
  const float most = largest(x, k);
  const bool finite = most <= std::numeric_limits<float>::max();
  const float scale = finite ? most / 127.0f : std::numeric_limits<float>::quiet_NaN();
  const float inverse = scale >= 0x1p-126f ? 1.0f / scale : 0.0f;
  for (int64_t i = 0; i < k; i++) codes[i] = nearest(x[i] * inverse);
  return scale;
}

// Signed codes of four k of a column in a tile (formats/codec.hpp), whose codes count from the middle of their range.
uint32_t four_of_int8(const uint8_t* tile, int64_t column, int64_t step) {
  uint32_t four;
  std::memcpy(&four, tile + (step * kPanelColumns + column) * 4, 4);
  return four ^ 0x80808080u;
}

uint32_t four_of_int4(const uint8_t* tile, int64_t column, int64_t step) {
  uint32_t eight;
  std::memcpy(&eight, tile + (step % 8 * kPanelColumns + column) * 4, 4);
  const uint32_t four = eight >> (step / 8 * 4) & 0x0f0f0f0fu;
  return ((four | 0x80808080u) - 0x08080808u) ^ 0x80808080u;
}

template <uint32_t (*kFour)(const uint8_t*, int64_t, int64_t)>
void unpack(const WeightSpec& spec, const uint8_t* weight, int64_t k, int8_t* rows) {
  constexpr int64_t kSteps = kTileK / 4;
  parallel_for(spec.panels(), threads_for(spec.panels() * kPanelColumns * k), [&](int64_t panel) {
    const uint8_t* const codes = weight + panel * spec.panel_bytes() + spec.codes_at();
    int8_t* const to = rows + panel * kPanelColumns * k;
    for (int64_t tile = 0; tile < spec.tiles(); tile++)
      for (int64_t column = 0; column < kPanelColumns; column++)
        for (int64_t step = 0; step < kSteps; step++) {
          const uint32_t four = kFour(codes + tile * spec.tile_bytes(), column, step);
          std::memcpy(to + column * k + tile * kTileK + step * 4, &four, 4);
        }
    for (int64_t column = 0; column < kPanelColumns; column++)
      std::fill(to + column * k + spec.padded_k(), to + (column + 1) * k, int8_t{0});
  });
}

}  // namespace

int threads_for(int64_t elements) { return elements < 1 << 15 ? 1 : num_threads(); }

void widen(const char* values, DType dtype, int64_t count, int64_t padded, float* out) {
  const auto* const halves = reinterpret_cast<const uint16_t*>(values);
  switch (dtype) {
    case DType::float32: std::memcpy(out, values, static_cast<std::size_t>(count) * 4); break;
    case DType::bfloat16:
      for (int64_t i = 0; i < count; i++) out[i] = float_from_bfloat16(halves[i]);
      break;
    default:
      for (int64_t i = 0; i < count; i++) out[i] = float_from_float16(halves[i]);
  }
  std::fill(out + count, out + padded, 0.0f);
}

void quantize_rows(const LinearArgs& args, int8_t* codes, float* row_scale) {
  const int64_t k = args.weight_spec.k, padded = args.weight_spec.padded_k(), block = 8;
  const int64_t row_bytes = k * static_cast<int64_t>(size_of(args.dtype));
  parallel_for(ceil_div(args.m, block), threads_for(args.m * padded), [&](int64_t task) {
    std::vector<float> wide(static_cast<std::size_t>(padded));
    for (int64_t row = task * block; row < std::min(args.m, (task + 1) * block); row++) {
      widen(static_cast<const char*>(args.x) + row * row_bytes, args.dtype, k, padded, wide.data());
      row_scale[row] = quantize(wide.data(), padded, codes + row * padded);
    }
  });
}

void rows_of_panels(const WeightSpec& spec, const uint8_t* weight, int64_t k, int8_t* rows) {
  (spec.format == Format::int8 ? unpack<four_of_int8> : unpack<four_of_int4>)(spec, weight, k, rows);
}

// A panel of float16 holds 16 columns of one k after another, one of bfloat16 those of two k in pairs.
void rows_of_k(const WeightSpec& spec, const uint8_t* weight, uint16_t* rows) {
  const int64_t row = spec.panels() * kPanelColumns;
  const auto bring = [&](int64_t k, int64_t panel) {
    uint16_t two[2 * kPanelColumns], apart[2][kPanelColumns];
    std::memcpy(two, weight + panel * spec.panel_bytes() + spec.codes_at() + k * kPanelColumns * 2, sizeof two);
    for (int64_t column = 0; column < kPanelColumns; column++)
      for (int64_t i = 0; i < 2; i++)
        apart[i][column] = two[spec.format == Format::bfloat16 ? 2 * column + i : i * kPanelColumns + column];
    for (int64_t i = 0; i < 2; i++)
      std::memcpy(rows + (k + i) * row + panel * kPanelColumns, apart[i], sizeof apart[i]);
  };
  parallel_for(spec.tiles(), threads_for(row * spec.padded_k()), [&](int64_t tile) {
    for (int64_t k = tile * kTileK; k < (tile + 1) * kTileK; k += 2)
      for (int64_t panel = 0; panel < spec.panels(); panel++) bring(k, panel);
  });
}

void scales_of_panels(const WeightSpec& spec, const uint8_t* weight, int64_t groups, float* scales) {
  std::fill(scales + spec.groups() * spec.n, scales + groups * spec.n, 0.0f);
  parallel_for(spec.panels(), threads_for(spec.groups() * spec.n), [&](int64_t panel) {
    const uint8_t* const from = weight + panel * spec.panel_bytes();
    const int64_t first = panel * kPanelColumns, columns = std::min(kPanelColumns, spec.n - first);
    float column_scale[kPanelColumns];
    std::memcpy(column_scale, from + spec.column_scale_at(), sizeof(column_scale));
    for (int64_t group = 0; group < spec.groups(); group++)
      for (int64_t column = 0; column < columns; column++) {
        float scale = column_scale[column];
        if (spec.group_size) {
          uint16_t half;
          std::memcpy(&half, from + spec.group_scale_at() + (group * kPanelColumns + column) * 2, 2);
          scale *= float_from_float16(half);
        }
        scales[group * spec.n + first + column] = scale;
      }
  });
}

}  // namespace lowbit::onednn
