// SPDX-License-Identifier: Apache-2.0
// Rows of the ops quantize and dequantize: float weights to panels, and back. A task is a panel.
#include LOWBIT_ISA_HEADER

#include "core/parallel.hpp"
#include "core/arena.hpp"
#include "core/huge_pages.hpp"
#include "core/scratch.hpp"
#include "cpu/panel.hpp"
#include "cpu/quantize/group_scales.hpp"
#include "cpu/rows.hpp"
#include "cpu/simd/math.hpp"
#include "cpu/vector_io.hpp"
#include "formats/layout.hpp"
#include "formats/scale_search.hpp"
#include "ops/quantize.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// The codes of 16 columns before interleaving, and their scales and zero points.
struct PlainPanel {
  const WeightSpec& spec;
  uint8_t* codes;  // [16][padded_k]
  float* scale;    // [16][groups]
  float* zero;     // [16][groups]

  PlainPanel(const WeightSpec& spec, Arena& arena)
      : spec(spec), codes(arena.array<uint8_t>(16 * spec.padded_k())), scale(arena.array<float>(16 * spec.groups())),
        zero(arena.array<float>(16 * spec.groups())) {
    if (!arena.base) return;
    // With groups of 32, the last half tile may have no codes.
    const int64_t covered = smaller(spec.padded_k(), spec.groups() * spec.group_k());
    for (int64_t column = 0; column < 16; column++)
      std::memset(codes + column * spec.padded_k() + covered, 0, spec.padded_k() - covered);
  }
};

// Stores the scales of one column, and rounds `scale` to the stored values.
LOWBIT_INLINE void store_scales(const PlainPanel& plain, int64_t column, uint8_t* panel) {
  const WeightSpec& spec = plain.spec;
  uint16_t* group_scale = reinterpret_cast<uint16_t*>(panel + spec.group_scale_at());
  reinterpret_cast<float*>(panel + spec.column_scale_at())[column] =
      round_scales(spec, plain.scale + column * spec.groups(),
                   [&](int64_t g, uint16_t half) { group_scale[g * 16 + column] = half; });
}

template <Format kFormat>
LOWBIT_INLINE void store_zeros_and_sum(const PlainPanel& plain, int64_t column, uint8_t* panel) {
  const WeightSpec& spec = plain.spec;
  const float* column_scale = reinterpret_cast<const float*>(panel + spec.column_scale_at()) + column;
  const uint16_t* group_scale = reinterpret_cast<const uint16_t*>(panel + spec.group_scale_at());
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
    sum.end_group(end - begin, zero[g], spec.group_size ? float_from_float16(group_scale[g * 16 + column]) : 1.0f);
  }
  reinterpret_cast<float*>(panel + spec.column_sum_at())[column] = sum.total(*column_scale);
}

// Tiles of codes, plane by plane (piece_of_code). Inlined, as gcc otherwise omits vzeroupper even around calls of
// functions without vectors (cpu/vector_io.hpp).
LOWBIT_INLINE void interleave(const PlainPanel& plain, uint8_t* out) {
  const int64_t padded = plain.spec.padded_k(), bits = lowbit::bits(plain.spec.format);
  for (int64_t tile = 0; tile < padded; tile += kTileK)
    for (int64_t count = 1; count <= bits; count *= 2) {
      if (!(bits & count)) continue;
      const uint32_t mask = 0x01010101u * ((1u << count) - 1);
      for (int64_t row = 0; row < 2 * count; row++)
        for (int64_t column = 0; column < 16; column++, out += 4) {
          uint32_t pieces = 0;
          for (int64_t shift = 0, k = tile + 4 * row; shift < 8; shift += count, k += 8 * count) {
            uint32_t codes;
            std::memcpy(&codes, plain.codes + column * padded + k, 4);
            pieces |= (codes >> (bits & (count - 1)) & mask) << shift;
          }
          std::memcpy(out, &pieces, 4);
        }
    }
}

// The same for a 2:4 weight, over zeros.
LOWBIT_INLINE void leave_out_zeros(const PlainPanel& plain, uint8_t* out) {
  const WeightSpec& spec = plain.spec;
  for (int64_t column = 0; column < 16; column++)
    for (int64_t k = 0; k < spec.k; k++)
      codec_of<Format::int8_semi_sparse>::write(out + k / kTileK * spec.tile_bytes(), column, k % kTileK,
                                                plain.codes[column * spec.padded_k() + k]);
}

// Makes a row 2:4: zeroes the two smallest of each four, later ones in a tie. Returns the distortion.
LOWBIT_INLINE Distortion prune(float* x, const float* importance, int64_t padded) {
  Distortion lost;
  for (int64_t first = 0; first < padded; first += 4) {
    float size[4];
    for (int i = 0; i < 4; i++) size[i] = __builtin_fabsf(x[first + i]);
    for (int i = 0; i < 4; i++) {
      int before = 0;
      for (int j = 0; j < 4; j++) before += j < i ? size[j] >= size[i] : size[j] > size[i];
      if (before < 2) continue;
      x[first + i] = 0;
      lost.noise += static_cast<double>(size[i]) * size[i] * (importance ? importance[first + i] : 1.0f);
    }
  }
  lost.signal = lost.absmax_noise = lost.noise;
  return lost;
}

// One group of each of 16 columns, for the search of their scales.
struct PanelGroup {
  static constexpr bool kSparesClamps = true;
  const float* weights;     // [count][16], divided by their absmax scales
  const float* importances;  // [count], or null if all weights count the same
  int64_t count;
  float code_max;

  LOWBIT_INLINE f32x16 y(int64_t i) const { return load(weights + i * 16); }
  LOWBIT_INLINE float importance(int64_t i) const { return importances[i]; }
  LOWBIT_INLINE f32x16 to_float16(f32x16 scale) const {
    alignas(64) uint16_t half[16];
    store_f16(half, scale);
    return load_f16(half);
  }
};

// One row of the weight (one column of the panel), widened to float32 and padded with zeros: computes scales from the
// ranges of its groups, rounds them for storage, and chooses zero points.
template <Format kFormat>
LOWBIT_INLINE void scale_column(const QuantizeArgs& args, const PlainPanel& plain, const float* x, int64_t column,
                                uint8_t* panel) {
  const int64_t groups = args.spec.groups();
  float* scale = plain.scale + column * groups;
  choose_scales<codec_of<kFormat>>(args.spec, x, args.mapping, scale);
  store_scales(plain, column, panel);
  choose_zeros(args.spec, x, scale, plain.zero + column * groups);
}

// Rounds the row to codes. Errors are weighted by the importance [padded_k] of their k, or equally if there is none.
template <Format kFormat>
LOWBIT_INLINE Distortion round_column(const QuantizeArgs& args, const PlainPanel& plain, const float* x,
                                      const float* importance, int64_t column, uint8_t* panel) {
  using Codec = codec_of<kFormat>;
  const WeightSpec& spec = args.spec;
  const int64_t groups = spec.groups(), group_k = spec.group_k(), padded = spec.padded_k();
  const float most = static_cast<float>(code_max(spec.format));
  f32x16 signal = set1(0.0f), noise = set1(0.0f);
  for (int64_t g = 0; g < groups; g++) {
    const float scale = plain.scale[column * groups + g];
    const f32x16 divisor = set1(scale != 0.0f ? scale : 1.0f), z = set1(plain.zero[column * groups + g]);
    const int64_t end = smaller(padded, (g + 1) * group_k);
    for (int64_t i = g * group_k; i < end; i += 16) {
      const f32x16 w = load(x + i), h = importance ? load(importance + i) : set1(1.0f);
      const i32x16 code = nearest_code<Codec>(add(div(w, divisor), z), most);
      const f32x16 error = sub(w, mul(sub(Codec::level_of(code), z), set1(scale)));
      store_u8(plain.codes + column * padded + i, code);
      signal = fma(mul(h, w), w, signal);
      noise = fma(mul(h, error), error, noise);
    }
  }
  store_zeros_and_sum<kFormat>(plain, column, panel);
  return {total(signal), total(noise)};
}

// Importances divided by the power of two of the largest, 0 for padding; null if there are none.
LOWBIT_INLINE const float* relative_importance(const QuantizeArgs& args, float* out) {
  if (!args.importance) return nullptr;
  const int64_t k = args.spec.k, padded = args.spec.padded_k();
  f32x16 most = set1(0x1p-126f);
  for (int64_t i = 0; i < padded; i += 16) {
    const f32x16 h = i < k ? load_as_float(args.importance.data, DType::float32, i, k - i) : set1(0.0f);
    store(out + i, h), most = max(most, h);
  }
  const f32x16 inverse = set1(1.0f / power_of_two_below(largest(most)));
  for (int64_t i = 0; i < padded; i += 16) store(out + i, mul(load(out + i), inverse));
  return out;
}

// Searches scales and zero points of a panel, given rows [16][padded_k]. Initially each group has those of its range,
// whose noise is returned. y: scratch for a group, [group_k][16].
template <Format kFormat, bool kWeighted>
double search_panel(const QuantizeArgs& args, const PlainPanel& plain, const float* rows, const float* importance,
                    float* y, const uint8_t* panel) {
  const WeightSpec& spec = args.spec;
  const int64_t groups = spec.groups(), padded = spec.padded_k();
  const bool half_scales = spec.group_size != 0;
  double noise = 0;
  alignas(64) float factor[16], limit[16], scale[16], zero[16], error[16];
  for (int64_t column = 0; column < 16; column++) {
    factor[column] = half_scales ? reinterpret_cast<const float*>(panel + spec.column_scale_at())[column] : 1.0f;
    bool fine = factor[column] < 0x1p126f;  // the column's factor could double without a loss of bits in any scale
    for (int64_t g = 0; g < groups; g++) {
      const float part = plain.scale[column * groups + g];
      fine &= part == 0.0f || part >= 0x1p-13f * factor[column];
    }
    limit[column] = !half_scales ? 0x1p127f : fine ? 4.0f : 2.0f;
  }
  for (int64_t g = 0; g < groups; g++) {
    const int64_t begin = g * spec.group_k(), count = smaller(spec.group_k(), padded - begin);
    for (int64_t column = 0; column < 16; column++) {
      scale[column] = plain.scale[column * groups + g], zero[column] = plain.zero[column * groups + g];
    }
    const f32x16 absmax = load(scale), one = set1(1.0f), none = set1(0.0f),
                 inverse = either(less(none, absmax), div(one, absmax), none),
                 part = max(load(factor), set1(0x1p-126f));
    for (int64_t i = 0; i < count; i += 16) transpose_16x16(rows + begin + i, padded, y + i * 16, 16);
    for (int64_t i = 0; i < count; i++) store(y + i * 16, mul(load(y + i * 16), inverse));
    const PanelGroup group{.weights = y, .importances = importance ? importance + begin : nullptr, .count = count,
                           .code_max = static_cast<float>(code_max(spec.format))};
    const ChosenScale<f32x16> choice = search<codec_of<kFormat>, kWeighted>(
        group, spec.asymmetric, half_scales, div(absmax, part), load(zero), load(limit));
    store(error, choice.absmax_error);
    for (int64_t column = 0; column < 16; column++)
      noise += static_cast<double>(error[column]) * scale[column] * scale[column];
    store(scale, mul(choice.scale, load(factor))), store(zero, choice.zero);
    for (int64_t column = 0; column < 16; column++)
      plain.scale[column * groups + g] = scale[column], plain.zero[column * groups + g] = zero[column];
  }
  return noise;
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
        std::memcpy(panel + float_at<kFormat>(column, k + i), &code, sizeof(code));
        sums.signal += static_cast<double>(w[i]) * w[i];
        sums.noise += static_cast<double>(w[i] - back) * (w[i] - back);
      }
    }
  return sums;
}

// The scratch memory of a task.
struct PackMemory {
  float* rows;        // [16][padded_k], or one row if scales are not searched for
  float* y;           // scratch for a group
  float* importance;  // [padded_k]
  PlainPanel plain;

  PackMemory(const QuantizeArgs& args, Arena& arena)
      : rows(arena.array<float>((args.searches() ? 16 : 1) * args.spec.padded_k())),
        y(arena.array<float>(args.searches() ? 16 * args.spec.group_k() : 0)),
        importance(arena.array<float>(args.importance ? args.spec.padded_k() : 0)), plain(args.spec, arena) {}
  static int64_t bytes(const QuantizeArgs& args) {
    Arena counted;
    PackMemory(args, counted);
    return counted.bytes;
  }
};

template <Format kFormat>
Distortion pack_coded_panel(const QuantizeArgs& args, int64_t index, uint8_t* panel) {
  const WeightSpec& spec = args.spec;
  const int64_t padded = spec.padded_k();
  const Scratch taken(PackMemory::bytes(args));
  Arena arena = taken.arena();
  const PackMemory memory(args, arena);
  const PlainPanel& plain = memory.plain;
  const float* importance = relative_importance(args, memory.importance);
  Distortion sums;
  auto finish = [&](int64_t column, const float* x) {
    sums += round_column<kFormat>(args, plain, x, importance, column, panel);
  };
  for (int64_t column = 0; column < 16; column++) {
    const int64_t row = index * 16 + column;
    float* x = memory.rows + (args.searches() ? column * padded : 0);
    for (int64_t k = 0; k < padded; k += 16)
      store(x + k, row < spec.n && k < spec.k
                       ? load_as_float(args.weight.data, args.weight.dtype, row * spec.k + k, spec.k - k)
                       : set1(0.0f));
    if (is_semi_sparse(spec.format)) sums += prune(x, importance, padded);
    scale_column<kFormat>(args, plain, x, column, panel);
    if (!args.searches()) finish(column, x);
  }
  if (args.searches()) {
    const auto search = importance ? search_panel<kFormat, true> : search_panel<kFormat, false>;
    const double absmax_noise = sums.noise + search(args, plain, memory.rows, importance, memory.y, panel);
    for (int64_t column = 0; column < 16; column++)
      store_scales(plain, column, panel), finish(column, memory.rows + column * padded);
    sums.absmax_noise = absmax_noise;
  } else {
    sums.absmax_noise = sums.noise;
  }
  if (is_semi_sparse(spec.format)) leave_out_zeros(plain, panel + spec.codes_at());
  else interleave(plain, panel + spec.codes_at());
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
  alignas(64) float wide[kTileK * 16], columns[16 * kTileK];
  const float* column_scale = reinterpret_cast<const float*>(args.packed.as<const uint8_t>() +
                                                             index * spec.panel_bytes() + spec.column_scale_at());
  const f32x16 scale = is_float(kFormat) ? set1(1.0f) : load(column_scale);
  for (int64_t tile = 0; tile < spec.tiles(); tile++) {
    with_step<kFormat>(spec, [&](auto kStep) {
      widen_tiles<kFormat, kStep>(spec, args.packed.as<const uint8_t>(), index, tile, 1, wide);
    });
    if (!is_float(kFormat))
      for (int64_t i = 0; i < kTileK; i++) store(wide + i * 16, mul(load(wide + i * 16), scale));
    for (int64_t i = 0; i < kTileK; i += 16) transpose_16x16(wide + i * 16, 16, columns + i, kTileK);
    for (int64_t column = 0; column < smaller(16, spec.n - index * 16); column++)
      for (int64_t i = 0, k = tile * kTileK; i < kTileK && k < spec.k; i += 16, k += 16)
        store_from_float(args.out.data, args.out.dtype, (index * 16 + column) * spec.k + k, spec.k - k,
                         load(columns + column * kTileK + i));
  }
}

// Runs body.operator()<Format>(panel) for all panels, in parallel.
template <class Body>
LOWBIT_INLINE void for_each_panel(const WeightSpec& spec, Body&& body) {
  with_format(spec.format, [&]<Format kFormat>() {
    parallel_for(spec.panels(), num_threads(), [&](int64_t panel) { body.template operator()<kFormat>(panel); });
  });
}

// Distortions are summed in panel order: the same for any number of threads.
void run_quantize(const QuantizeArgs& args) {
  const int64_t panels = args.spec.panels();
  const Scratch memory(panels * static_cast<int64_t>(sizeof(Distortion)));
  Distortion* const sums = memory.as<Distortion>();
  for_each_panel(args.spec, [&]<Format kFormat>(int64_t panel) {
    sums[panel] = quantize_panel<integers_as_int8(kFormat)>(args, panel);
  });
  *args.distortion = {};
  for (int64_t panel = 0; panel < panels; panel++) *args.distortion += sums[panel];
}

void run_dequantize(const DequantizeArgs& args) {
  prefer_huge_pages(args.out.data, bytes_of(args.out));
  for_each_panel(args.spec,
                 [&]<Format kFormat>(int64_t panel) { dequantize_panel<read_as(kFormat)>(args, panel); });
}

std::string_view takes_all(const DequantizeArgs& args) { return args.indices ? "some rows are wanted" : ""; }

constexpr Kernel<QuantizeArgs> kQuantizeRows[] = {
    {LOWBIT_ROW("quantize_panels"), never_refuses<QuantizeArgs>, run_quantize}};
constexpr Kernel<DequantizeArgs> kDequantizeRows[] = {
    {LOWBIT_ROW("dequantize_panels"), takes_all, run_dequantize}};

}  // namespace

void quantize_quantize_rows(Backend& backend) {
  add(backend, kQuantizeRows), add(backend, kDequantizeRows);
}

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
