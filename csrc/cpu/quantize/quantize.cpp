// SPDX-License-Identifier: Apache-2.0
// Rows of the ops quantize and dequantize: float weights to panels, and back. One task is one panel.
#include LOWBIT_ISA_HEADER

#include "core/parallel.hpp"
#include "cpu/red_zones.hpp"
#include "cpu/scratch.hpp"
#include "cpu/panel.hpp"
#include "cpu/rows.hpp"
#include "cpu/simd/math.hpp"
#include "cpu/vector_io.hpp"
#include "formats/layout.hpp"
#include "ops/quantize.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// The codes of 16 columns before interleaving, and their scales and zero points.
struct PlainPanel {
  const WeightSpec& spec;
  uint8_t* codes;  // [16][padded_k]
  float* scale;    // [16][groups]
  float* zero;     // [16][groups]

  // Scratch for `floats` floats and a panel.
  static Arena memory(const WeightSpec& spec, int64_t floats) {
    Arena counted;
    counted.array<float>(floats), PlainPanel(spec, counted);
    return {static_cast<char*>(scratch(Scratch::task, counted.bytes))};
  }
  PlainPanel(const WeightSpec& spec, Arena& arena)
      : spec(spec), codes(arena.array<uint8_t>(16 * spec.padded_k())), scale(arena.array<float>(16 * spec.groups())),
        zero(arena.array<float>(16 * spec.groups())) {
    if (!arena.base) return;
    const int64_t covered =
        smaller(spec.padded_k(), spec.groups() * spec.group_k());  // with groups of 32 the last half tile may have none
    for (int64_t column = 0; column < 16; column++)
      std::memset(codes + column * spec.padded_k() + covered, 0, spec.padded_k() - covered);
  }
};

// 2^floor(log2(x)), exact; 0 for 0 and subnormals.
LOWBIT_INLINE float power_of_two_below(float x) { return float_from_bits(bits_of_float(x) & 0x7f800000u); }

// Splits the scales of one column into column_scale and f16 group scales, and rounds `scale` to what is stored. A power
// of two as column_scale keeps every f16 scale of an imported checkpoint exact, and gives weights of any magnitude the
// full precision of f16.
LOWBIT_INLINE void store_scales(const PlainPanel& plain, int64_t column, uint8_t* panel) {
  const WeightSpec& spec = plain.spec;
  float* scale = plain.scale + column * spec.groups();
  float* column_scale = reinterpret_cast<float*>(panel + spec.column_scale_at()) + column;
  if (spec.group_size == 0) {
    *column_scale = scale[0];
    return;
  }
  float largest_scale = 0.0f;
  for (int64_t g = 0; g < spec.groups(); g++) largest_scale = scale[g] > largest_scale ? scale[g] : largest_scale;
  const float factor = power_of_two_below(largest_scale), inverse = factor > 0.0f ? 1.0f / factor : 0.0f;
  uint16_t* group_scale = reinterpret_cast<uint16_t*>(panel + spec.group_scale_at());
  *column_scale = factor;
  for (int64_t g = 0; g < spec.groups(); g++) {
    const uint16_t half = float16_from_float(scale[g] * inverse);
    group_scale[g * 16 + column] = half;
    scale[g] = float_from_float16(half) * factor;
  }
}

template <Format kFormat>
LOWBIT_INLINE void store_zeros_and_sum(const PlainPanel& plain, int64_t column, uint8_t* panel) {
  const WeightSpec& spec = plain.spec;
  const float* scale = plain.scale + column * spec.groups();
  float* zero = plain.zero + column * spec.groups();
  uint16_t* stored = reinterpret_cast<uint16_t*>(panel + spec.zero_at());
  const uint8_t* codes = plain.codes + column * spec.padded_k();
  ColumnSum<kFormat> sum;
  for (int64_t g = 0; g < spec.groups(); g++) {
    if (spec.asymmetric) {
      stored[g * 16 + column] = float16_from_float(zero[g]);
      zero[g] = float_from_float16(stored[g * 16 + column]);
    }
    const int64_t begin = g * spec.group_k(), end = smaller(spec.k, begin + spec.group_k());
    for (int64_t i = begin; i < end; i++) sum.add(codes[i]);
    sum.end_group(end - begin, zero[g], scale[g]);
  }
  reinterpret_cast<float*>(panel + spec.column_sum_at())[column] = static_cast<float>(sum.total);
}

// Inlined: gcc leaves vzeroupper out around calls of functions without vectors too (cpu/vector_io.hpp).
LOWBIT_INLINE void interleave(const PlainPanel& plain, uint8_t* out) {
  const WeightSpec& spec = plain.spec;
  const int64_t padded = spec.padded_k();
  auto four = [&](int64_t column, int64_t k) {
    uint32_t codes;
    std::memcpy(&codes, plain.codes + column * padded + k, 4);
    return codes;
  };
  for (int64_t k = 0; k < padded; k += bits(spec.format) == 4 && k % 64 == 28 ? 36 : 4)
    for (int64_t column = 0; column < 16; column++, out += 4) {
      uint32_t codes = four(column, k);
      if (bits(spec.format) == 4) codes |= four(column, k + 32) << 4;
      std::memcpy(out, &codes, 4);
    }
}

// Scale and zero point of x[0..count), before rounding to what is stored.
template <class Codec>
LOWBIT_INLINE float choose_scale(const float* x, int64_t count, Mapping mapping) {
  f32x16 low16 = set1(0.0f), high16 = set1(0.0f);  // a range contains 0, and padding is 0
  for (int64_t i = 0; i < count; i += 16) low16 = min(low16, load(x + i)), high16 = max(high16, load(x + i));
  const float low = -largest(sub(set1(0.0f), low16)), high = largest(high16), absmax = -low > high ? -low : high;
  if constexpr (Codec::kind == CodecKind::integer) {
    constexpr float kLevels = Codec::code_max, kHalf = (kLevels + 1) / 2;
    switch (mapping) {
      case Mapping::symmetric: break;
      case Mapping::symmetric_no_clipping_err:
        return -low / kHalf > high / (kHalf - 1) ? -low / kHalf : high / (kHalf - 1);
      case Mapping::asymmetric: return (high - low) / kLevels;
    }
  }
  return absmax / Codec::range;
}

LOWBIT_INLINE float choose_zero(const float* x, int64_t count, float scale, float levels) {
  float low = 0.0f;
  for (int64_t i = 0; i < count; i++) low = x[i] < low ? x[i] : low;
  const float zero = scale > 0.0f ? __builtin_nearbyintf(-low / scale) : 0.0f;
  return zero > levels ? levels : zero;
}

// One row of the weight (one column of the panel), widened to float32 and padded with zeros.
template <Format kFormat>
LOWBIT_INLINE Distortion quantize_column(const QuantizeArgs& args, const PlainPanel& plain, const float* x,
                                         int64_t column, uint8_t* panel) {
  using Codec = codec_of<kFormat>;
  const WeightSpec& spec = args.spec;
  const int64_t groups = spec.groups(), group_k = spec.group_k(), padded = spec.padded_k();
  float* scale = plain.scale + column * groups;
  auto length = [&](int64_t g) { return smaller(group_k, padded - g * group_k); };
  for (int64_t g = 0; g < groups; g++) {
    scale[g] = choose_scale<Codec>(x + g * group_k, length(g), args.mapping);
    if (!(scale[g] >= 0x1p-126f)) scale[g] = 0.0f;
  }
  store_scales(plain, column, panel);
  f32x16 signal = set1(0.0f), noise = set1(0.0f);
  for (int64_t g = 0; g < groups; g++) {
    const float zero =
        spec.asymmetric ? choose_zero(x + g * group_k, length(g), scale[g], Codec::code_max) : Codec::zero;
    const f32x16 divisor = set1(scale[g] > 0.0f ? scale[g] : 1.0f), z = set1(zero), s = set1(scale[g]);
    plain.zero[column * groups + g] = zero;
    for (int64_t i = g * group_k; i < g * group_k + length(g); i += 16) {
      const f32x16 w = load(x + i);
      const i32x16 code = Codec::nearest(add(div(w, divisor), z));
      const f32x16 error = sub(w, mul(sub(Codec::level_of(code), z), s));
      store_u8(plain.codes + column * padded + i, code);
      signal = fma(w, w, signal);
      noise = fma(error, error, noise);
    }
  }
  store_zeros_and_sum<kFormat>(plain, column, panel);
  return {total(signal), total(noise)};
}

template <Format kFormat>
Distortion pack_float_panel(const QuantizeArgs& args, int64_t index, uint8_t* panel) {
  const WeightSpec& spec = args.spec;
  const int64_t rows = smaller(16, spec.n - index * 16);
  Distortion sums;
  for (int64_t column = 0; column < rows; column++)
    for (int64_t k = 0; k < spec.k; k += 16) {
      const int64_t count = smaller(16, spec.k - k);
      alignas(64) float w[16];
      store(w, load_as_float(args.weight.data, args.weight.dtype, (index * 16 + column) * spec.k + k, count));
      for (int64_t i = 0; i < count; i++) {
        const auto code = codec_of<kFormat>::encode(w[i]);
        const float back = codec_of<kFormat>::decode(code);
        std::memcpy(panel + code_position<kFormat>(column, k + i).byte, &code, sizeof(code));
        sums.signal += static_cast<double>(w[i]) * w[i];
        sums.noise += static_cast<double>(w[i] - back) * (w[i] - back);
      }
    }
  return sums;
}

template <Format kFormat>
Distortion pack_coded_panel(const QuantizeArgs& args, int64_t index, uint8_t* panel) {
  const WeightSpec& spec = args.spec;
  const int64_t padded = spec.padded_k();
  Arena arena = PlainPanel::memory(spec, padded);
  float* x = arena.array<float>(padded);
  const PlainPanel plain(spec, arena);
  Distortion sums;
  for (int64_t column = 0; column < 16; column++) {
    const int64_t row = index * 16 + column;
    for (int64_t k = 0; k < padded; k += 16)
      store(x + k, row < spec.n && k < spec.k
                       ? load_as_float(args.weight.data, args.weight.dtype, row * spec.k + k, spec.k - k)
                       : set1(0.0f));
    const Distortion column_sums = quantize_column<kFormat>(args, plain, x, column, panel);
    sums.signal += column_sums.signal, sums.noise += column_sums.noise;
  }
  interleave(plain, panel + spec.codes_at());
  return sums;
}

template <Format kFormat>
Distortion quantize_panel(const QuantizeArgs& args, int64_t index) {
  uint8_t* panel = args.packed.as<uint8_t>() + index * args.spec.panel_bytes();
  std::memset(panel, 0, args.spec.panel_bytes());
  if constexpr (is_float(kFormat)) return pack_float_panel<kFormat>(args, index, panel);
  else return pack_coded_panel<kFormat>(args, index, panel);
}

template <Format kFormat>
void dequantize_panel(const DequantizeArgs& args, int64_t index) {
  const WeightSpec& spec = args.spec;
  float* wide = static_cast<float*>(scratch(Scratch::task, kTileK * 16 * sizeof(float)));
  const float* column_scale = reinterpret_cast<const float*>(args.packed.as<const uint8_t>() +
                                                             index * spec.panel_bytes() + spec.column_scale_at());
  for (int64_t tile = 0; tile < spec.tiles(); tile++) {
    widen_tiles<kFormat>(spec, args.packed.as<const uint8_t>(), index, tile, 1, wide);
    for (int64_t column = 0; column < smaller(16, spec.n - index * 16); column++) {
      const float scale = is_float(kFormat) ? 1.0f : column_scale[column];
      float* out = args.out.as<float>() + (index * 16 + column) * spec.k + tile * kTileK;
      for (int64_t i = 0; i < smaller(kTileK, spec.k - tile * kTileK); i++) out[i] = wide[i * 16 + column] * scale;
    }
  }
}

// body.operator()<Format>(panel) for every panel, in parallel.
template <class Body>
LOWBIT_INLINE void for_each_panel(const WeightSpec& spec, Body&& body) {
  with_format(spec.format, [&]<Format kFormat>() {
    parallel_for(spec.panels(), num_threads(), [&](int64_t panel) { body.template operator()<kFormat>(panel); });
  });
}

// Distortions are summed in the order of the panels: the same for any number of threads.
void run_quantize(const QuantizeArgs& args) {
  const int64_t panels = args.spec.panels();
  Distortion* sums = static_cast<Distortion*>(scratch(Scratch::call, panels * sizeof(Distortion)));
  for_each_panel(args.spec, [&]<Format kFormat>(int64_t panel) { sums[panel] = quantize_panel<kFormat>(args, panel); });
  *args.distortion = {};
  for (int64_t panel = 0; panel < panels; panel++)
    args.distortion->signal += sums[panel].signal, args.distortion->noise += sums[panel].noise;
}

void run_dequantize(const DequantizeArgs& args) {
  for_each_panel(args.spec, [&]<Format kFormat>(int64_t panel) { dequantize_panel<kFormat>(args, panel); });
}

constexpr Kernel<QuantizeArgs> kQuantizeRows[] = {
    {LOWBIT_ROW("quantize_panels"), never_refuses<QuantizeArgs>, run_quantize}};
constexpr Kernel<DequantizeArgs> kDequantizeRows[] = {
    {LOWBIT_ROW("dequantize_panels"), never_refuses<DequantizeArgs>, run_dequantize}};

}  // namespace

void quantize_quantize_rows(Backend& backend) {
  add(backend, kQuantizeRows), add(backend, kDequantizeRows);
}

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
