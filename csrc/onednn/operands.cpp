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

void rows_of_panels(const WeightSpec& spec, const uint8_t* weight, int8_t* rows, float* column_scale) {
  constexpr int64_t kSteps = kTileK / 4;  // a row of a tile is 16 columns x 4 k
  const int64_t k = spec.padded_k();
  parallel_for(spec.panels(), threads_for(spec.panels() * kPanelColumns * k), [&](int64_t panel) {
    const uint8_t* const from = weight + panel * spec.panel_bytes();
    std::memcpy(column_scale + panel * kPanelColumns, from + spec.column_scale_at(), kPanelColumns * sizeof(float));
    int8_t* const to = rows + panel * kPanelColumns * k;
    for (int64_t tile = 0; tile < spec.tiles(); tile++) {
      const uint8_t* const codes = from + spec.codes_at() + tile * spec.tile_bytes();
      for (int64_t column = 0; column < kPanelColumns; column++)
        for (int64_t step = 0; step < kSteps; step++) {
          uint32_t four;
          std::memcpy(&four, codes + (step * kPanelColumns + column) * 4, 4);
          four ^= 0x80808080u;  // counted from 128 to signed
          std::memcpy(to + column * k + tile * kTileK + step * 4, &four, 4);
        }
    }
  });
}

}  // namespace lowbit::onednn
