// SPDX-License-Identifier: Apache-2.0
// Reads packed panels: their sections, and codes as vectors of 16 columns. Include after a header of cpu/simd/.
#pragma once

#include "core/isa.hpp"
#include "cpu/planes.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// The sections of one panel.
struct PanelView {
  const uint16_t* group_scale;  // null if scales are per channel
  const uint16_t* zero;         // null if symmetric
  const uint8_t* codes;
  const uint8_t* end;
  int64_t bytes;
  float code_shift;  // offset of unpacked codes, which are centered at 128, from the codes that `zero` refers to
};

LOWBIT_INLINE PanelView view_panel(const WeightSpec& spec, const uint8_t* weight, int64_t panel) {
  const uint8_t* base = weight + panel * spec.panel_bytes();
  return {spec.group_size ? reinterpret_cast<const uint16_t*>(base + spec.group_scale_at()) : nullptr,
          spec.asymmetric ? reinterpret_cast<const uint16_t*>(base + spec.zero_at()) : nullptr, base + spec.codes_at(),
          base + spec.panel_bytes(), spec.panel_bytes(),
          is_unpacked(spec.format) ? 128.0f - static_cast<float>(symmetric_zero(spec.format)) : 0.0f};
}

// The codes of consecutive tiles: in place, or unpacked into `room` (kByteTile each).
template <Format kFormat>
LOWBIT_INLINE const uint8_t* readable_tiles(const WeightSpec& spec, const PanelView& panel, int64_t first_tile,
                                            int64_t tiles, uint8_t* room) {
  const uint8_t* codes = panel.codes + first_tile * spec.tile_bytes();
  if (kFormat != Format::int8 || !is_unpacked(spec.format)) return codes;
  unpack_tiles(spec.format, codes, tiles, room);
  return room;
}

// The lines that are prefetched while the codes of a panel stream past, in one stream or in four:
//
//   one    codes: |.......used|<- 4 KiB ->|line|line|line|line|.......|
//
//   four   codes: |.......used.......|line.......|line.......|line.......|line.......|
//                 |- this stretch ---|-- quarter of the next stretch, each a line further every time ---|
//
// A stretch is a panel, or an equal part of it of at most 64 KiB, which waits in L2. After the last stretch of a panel
// comes the panel that the thread takes next.
class Ahead {
 public:
  LOWBIT_INLINE Ahead() = default;
  LOWBIT_INLINE Ahead(const WeightSpec& spec, const PanelView& panel, const uint8_t* next, bool four)
      : used_(panel.codes), end_(panel.end), step_(next - (panel.end - panel.bytes)), four_(four) {
    if (four) {
      stretch_ = stretch_of(spec, panel);
      across_ = stretch_ / 4, down_ = 64;
      for (int64_t at = 0; at < 128; at += 64)
        __builtin_prefetch(panel.end - panel.bytes + at);  // column scale and sum: wanted at its end
    }
    begin(panel);
  }
  LOWBIT_INLINE void fetch(int64_t line) const { __builtin_prefetch(at_ + (line & 3) * across_ + (line >> 2) * down_); }
  // So much of the codes was used, and as many lines were fetched.
  LOWBIT_INLINE void advance(const PanelView& panel, int64_t bytes) {
    at_ += bytes / 4;
    if (four_ && at_ != stop_) return;
    used_ += four_ ? stretch_ : bytes;
    begin(panel);
  }
  // Scales and zero points of a group: those of the panel that comes next. One stream meets them on its way.
  LOWBIT_INLINE void fetch_group(const PanelView& panel, int64_t g) const {
    if (!four_) return;
    if (panel.group_scale) __builtin_prefetch(reinterpret_cast<const uint8_t*>(panel.group_scale + g * 16) + step_);
    if (panel.zero) __builtin_prefetch(reinterpret_cast<const uint8_t*>(panel.zero + g * 16) + step_);
  }

 private:
  LOWBIT_INLINE static int64_t stretch_of(const WeightSpec& spec, const PanelView& panel) {
    constexpr int64_t kMaxBytes = 64 << 10;
    const int64_t bytes = panel.end - panel.codes;
    return bytes <= kMaxBytes ? bytes : round_up(ceil_div(bytes, ceil_div(bytes, kMaxBytes)), spec.tile_bytes());
  }
  // Sets the lines to fetch while the codes from used_ on are read: a stretch, or in one stream the codes of a step.
  LOWBIT_INLINE void begin(const PanelView& panel) { four_ ? begin_stretch(panel) : begin_one(panel); }
  LOWBIT_INLINE void begin_stretch(const PanelView& panel) {
    at_ = used_ + stretch_ < end_ ? used_ + stretch_ : panel.codes + step_;
    stop_ = at_ + stretch_ / 4;
  }
  LOWBIT_INLINE void begin_one(const PanelView& panel) {
    at_ = used_ + 4096 + (used_ + 4096 < end_ ? 0 : step_ - panel.bytes);
  }

  // at_: the next line to prefetch, the first of four that are across_ apart; the next four are down_ further. used_:
  // start of the stretch now being read. stop_: end of the first quarter of the stretch being prefetched.
  const uint8_t *at_, *stop_, *used_, *end_;
  int64_t stretch_ = 0, across_ = 64, down_ = 256, step_;
  bool four_ = false;
};

// One stream into L2, through all bytes of a panel in the order of memory, and on to the next one. More lines can be on
// their way to L2 than to L1: W4A8 reads 1.5 to 2.4 times as fast as with four streams into L1 (m = 1, Zen 4).
//
//   panel: |scales|codes .......used|<- kAhead ->|line|line|line|line|.......|
class AheadInL2 {
 public:
  LOWBIT_INLINE AheadInL2() = default;
  LOWBIT_INLINE AheadInL2(const WeightSpec& spec, const PanelView& panel, const uint8_t* next)
      : at_(panel.end - panel.bytes + smaller(panel.bytes, spec.codes_at() + kAhead)), end_(panel.end),
        jump_(next - panel.end) {
    follow();
    for (int64_t at = 0; at < spec.group_scale_at(); at += 64) fetch_next();
  }
  LOWBIT_INLINE void fetch(int64_t line) const { __builtin_prefetch(at_ + line * 64, 0, kL2); }
  LOWBIT_INLINE void advance(const PanelView&, int64_t bytes) {
    at_ += bytes;
    follow();
  }
  LOWBIT_INLINE void fetch_group(const PanelView& panel, int64_t g) {
    if (g % 2) return;  // a line has two groups
    if (panel.group_scale) fetch_next();
    if (panel.zero) fetch_next();
  }

 private:
  // Memory has somewhat less on its way to a thread: 4 KiB are 0.9 of the speed, 32 KiB as good (Zen 4).
  static constexpr int64_t kAhead = 8 << 10;
  static constexpr int kL2 = 2;  // a hint of __builtin_prefetch

  LOWBIT_INLINE void fetch_next() {
    __builtin_prefetch(at_, 0, kL2);
    at_ += 64;
  }
  LOWBIT_INLINE void follow() {
    if (at_ < end_) return;
    at_ += jump_, end_ += jump_;
    jump_ = 0, end_ = at_ + kAhead;
  }

  const uint8_t *at_, *end_;
  int64_t jump_;
};

// How nibbles are prefetched for integer products: through L2 on AMD, in four streams on Intel, where L2 was not tried.
// On Zen 5 L2 takes 0.8 to 0.95 of the time of four streams at m = 1 to 6, and is level from 8 rows on (two threads).
class NibblesAhead {
 public:
  LOWBIT_INLINE NibblesAhead() = default;
  LOWBIT_INLINE NibblesAhead(const WeightSpec& spec, const PanelView& panel, const uint8_t* next)
      : in_four_(!reads_through_l2()) {
    if (in_four_) four_ = Ahead(spec, panel, next, true);
    else one_ = AheadInL2(spec, panel, next);
  }
  LOWBIT_INLINE void fetch(int64_t line) const { in_four_ ? four_.fetch(line) : one_.fetch(line); }
  LOWBIT_INLINE void advance(const PanelView& panel, int64_t bytes) {
    in_four_ ? four_.advance(panel, bytes) : one_.advance(panel, bytes);
  }
  LOWBIT_INLINE void fetch_group(const PanelView& panel, int64_t g) {
    in_four_ ? four_.fetch_group(panel, g) : one_.fetch_group(panel, g);
  }

 private:
  Ahead four_;
  AheadInL2 one_;
  bool in_four_;
};

// The formats that are prefetched in four streams: int4 in float products on AVX2 (kStreamFour in simd/); on Zen 5
// four streams take 10 to 20 % from float32, and from all float activations on AVX-512. On Sapphire Rapids they give
// float32 1.3 to 1.6, bfloat16 1.35, int8 1.25 and W8A8 1.25 to 1.6 times the speed (m = 1, from memory, two threads);
// formats of more work for each weight wait for that work.
template <Format kFormat>
constexpr bool kLittleWork = kFormat == Format::float32 || kFormat == Format::bfloat16 ||
                             kFormat == Format::float16 || kFormat == Format::int8 || kFormat == Format::fp8_e4m3;
template <Format kFormat>
LOWBIT_INLINE bool in_four_streams(const WeightSpec& spec, bool for_int4) {
  if (bits(kFormat) == 4) return for_int4;
  return kLittleWork<kFormat> && !is_unpacked(spec.format) && reads_in_streams();
}

constexpr int64_t kHalfK = 32;  // half a tile: max depth of an int16 accumulator

// The depth that shares a scale in all weights of a format. For codes in planes, which are read as int8, with_step
// looks at the weight: groups of 16 halve it.
template <Format kFormat>
constexpr int64_t kStepK = is_float(kFormat) ? kHalfK : smallest_group(kFormat);
template <Format kFormat, class Body>
LOWBIT_INLINE void with_step(const WeightSpec& spec, Body&& body) {
  if constexpr (kFormat == Format::int8)
    if (is_unpacked(spec.format) && spec.group_size == 16) return body(std::integral_constant<int64_t, 16>{});
  body(std::integral_constant<int64_t, kStepK<kFormat>>{});
}

// Reads 16 columns, for codecs (formats/codec.hpp).
struct Lanes {
  LOWBIT_INLINE static f32x16 float32(const uint8_t* p) { return load(reinterpret_cast<const float*>(p)); }
  LOWBIT_INLINE static f32x16 float16(const uint8_t* p) { return load_f16(reinterpret_cast<const uint16_t*>(p)); }
  LOWBIT_INLINE static u8x64 codes(const uint8_t* p) { return load_codes(p); }
  LOWBIT_INLINE static i32x16 words(const uint8_t* p) { return load_i32(reinterpret_cast<const int32_t*>(p)); }
  LOWBIT_INLINE static constexpr int int4_shift(int at) { return cpu::LOWBIT_ISA_NAME::int4_shift(at); }
};

// A codec, and its derived constants: units of a tile of 64 k.
template <Format kFormat>
struct Unit : codec_of<kFormat> {
  using Codec = codec_of<kFormat>;
  static constexpr int kValues = Codec::unit_values, kBytes = Codec::unit_bytes, kPerTile = kTileK / Codec::unit_values;
  template <int at, bool plain = false> LOWBIT_INLINE static f32x16 value(const uint8_t* p) {
    if constexpr (plain) return Codec::template plain_value<at, Lanes>(p);
    else return Codec::template value<at, Lanes>(p);
  }
  // body(whether the unit is plain, as a constant); false if not asked for
  template <class Body> LOWBIT_INLINE static void with_plain(const uint8_t* unit, bool asked, Body&& body) {
    if constexpr (requires { Codec::template is_plain<Lanes>(unit); }) {
      if (asked && Codec::template is_plain<Lanes>(unit)) [[likely]] return body(std::true_type{});
    }
    body(std::false_type{});
  }
  // Judges a panel by its first tile. A mispredicted branch takes as long as two units.
  LOWBIT_INLINE static bool mostly_plain(const uint8_t* codes) {
    int64_t plain = 0;
    for (int64_t unit = 0; unit < kPerTile; unit++)
      with_plain(codes + unit * kBytes, true, [&](auto is_plain) { plain += is_plain; });
    return plain * 8 > kPerTile * 6;
  }
};

template <Format kFormat>
LOWBIT_INLINE constexpr int64_t k_in_tile(int64_t unit, int at) { return codec_of<kFormat>::k_of(unit, at); }
// Undoes the 2^shift in value().
template <Format kFormat>
LOWBIT_INLINE constexpr float unshift_of(int at) {
  const int shift = codec_of<kFormat>::template shift<Lanes>(at);
  return __builtin_bit_cast(float, (127 - shift) << 23);
}

// value() returns code - value_zero, with codes as `zero` counts them.
template <Format kFormat>
LOWBIT_INLINE float value_zero(const PanelView& panel) {
  return codec_of<kFormat>::value_zero - panel.code_shift;
}

// Scale of group g without the column's factor, and its zero point.
LOWBIT_INLINE f32x16 scale_of(const PanelView& panel, int64_t g) {
  return panel.group_scale ? load_f16(panel.group_scale + g * 16) : set1(1.0f);
}
template <Format kFormat>
LOWBIT_INLINE f32x16 zero_of(const PanelView& panel, int64_t g) {
  if (!panel.zero) return set1(static_cast<float>(symmetric_zero(kFormat)) - panel.code_shift);
  return load_f16(panel.zero + g * 16);
}

// The integer nearest to a zero point for which code - zero, at most 256 in magnitude, is exact in 8 bits. It is
// subtracted from the codes first: value_zero - zero may have more bits than a float32 (int8: 128 - 2^-17).
LOWBIT_INLINE f32x16 whole_zero(const PanelView& panel, f32x16 zero, int code_max) {
  const float most = 256.0f - panel.code_shift;
  return max(set1(static_cast<float>(code_max) - 512.0f + most), min(set1(most), to_float(to_int(zero))));
}

// `tiles` tiles of one panel as float32 [k][16], without the column scale. Prefetches `ahead` bytes ahead, in the block
// that the caller widens next: otherwise each block starts with the latency of memory, a fifth of the time at m = 32
// (AVX2, Zen 5).
template <Format kFormat, int64_t kStep>
void widen_tiles(const WeightSpec& spec, const uint8_t* weight, int64_t panel, int64_t first_tile, int64_t tiles,
                 float* out, int64_t ahead = 0) {
  using U = Unit<kFormat>;
  const PanelView view = view_panel(spec, weight, panel);
  constexpr int64_t kParts = is_float(kFormat) ? 1 : kTileK / kStep;
  // For each part of a tile with one scale: value = (raw + whole) * scale + rest, rounded once. Without zero points
  // whole is 0.
  f32x16 scale[kParts], whole[kParts], rest[kParts];
  alignas(64) uint8_t room[kByteTile];
  // Values of int8 per channel are final, without a scale.
  const bool scaled = codec_of<kFormat>::value_zero != symmetric_zero(kFormat) || view.group_scale;
  for (int64_t tile = first_tile; tile < first_tile + tiles; tile++, out += kTileK * 16) {
    if constexpr (!is_float(kFormat))
      for (int64_t part = 0; part < kParts; part++) {
        const int64_t k = tile * kTileK + part * kStep,
                      g = smaller(spec.group_size ? k / spec.group_size : 0, spec.groups() - 1);
        scale[part] = scale_of(view, g);
        const f32x16 zero = zero_of<kFormat>(view, g), origin = set1(value_zero<kFormat>(view));
        const f32x16 first = view.zero ? whole_zero(view, zero, U::code_max) : origin;
        whole[part] = sub(origin, first), rest[part] = mul(sub(first, zero), scale[part]);
      }
    const uint8_t* codes = readable_tiles<kFormat>(spec, view, tile, 1, room);
    const auto widen = [&](auto zeros) __attribute__((always_inline)) {
      for (int64_t unit = 0; unit < U::kPerTile; unit++) {
        const uint8_t* from = codes + unit * U::kBytes;
        __builtin_prefetch(from + ahead);
        U::with_plain(from, true, [&](auto plain) {
          unroll<U::kValues>([&](auto at) {
            const int64_t k = k_in_tile<kFormat>(unit, at);
            f32x16 w = U::template value<at, plain>(from);
            if constexpr (!is_float(kFormat)) {
              constexpr float kUnshift = unshift_of<kFormat>(at);
              const int64_t part = k / kStep;
              if constexpr (zeros) w = fma(fma(w, set1(kUnshift), whole[part]), scale[part], rest[part]);
              else if (kUnshift != 1.0f || scaled) w = fma(w, mul(scale[part], set1(kUnshift)), rest[part]);
            }
            store(out + k * 16, w);
          });
        });
      }
    };
    if constexpr (is_integer(kFormat))
      if (view.zero) {
        widen(std::true_type{});
        continue;
      }
    widen(std::false_type{});
  }
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
