// SPDX-License-Identifier: Apache-2.0
// The row of the op repack: a packed weight from any layout to any other (formats/layout.hpp). Codes, scales and zero
// points stay what they are, bit for bit. One task is 16 columns, which are whole rows of every layout.
#include LOWBIT_ISA_HEADER

#include "core/parallel.hpp"
#include "cpu/rows.hpp"
#include "formats/layout.hpp"
#include "ops/quantize.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kTaskColumns = 16;

// Code (n, k), and whether it is a nibble of its byte.
template <Format kFormat, class From>
LOWBIT_INLINE uint32_t read_code(const From& from, const uint8_t* in, int64_t n, int64_t k) {
  const CodePosition at = from.template code<kFormat>(n, k);
  if constexpr (bits(kFormat) == 4) return at.high ? in[at.byte] >> 4 : in[at.byte] & 15;
  uint32_t code = 0;
  std::memcpy(&code, in + at.byte, bits(kFormat) / 8);
  return code;
}

template <Format kFormat, class To>
LOWBIT_INLINE void write_code(const To& to, uint8_t* out, int64_t n, int64_t k, uint32_t code) {  // over zeros
  const CodePosition at = to.template code<kFormat>(n, k);
  if constexpr (bits(kFormat) == 4) out[at.byte] |= static_cast<uint8_t>(at.high ? code << 4 : code);
  else std::memcpy(out + at.byte, &code, bits(kFormat) / 8);
}

// Scales, zero points and sum of a column with codes, and what its padding along k holds.
template <Format kFormat, class From, class To>
void repack_scales(const RepackArgs& args, From from, To to, int64_t n) {
  using Codec = codec_of<kFormat>;
  const WeightSpec spec = args.spec;
  const uint8_t* in = args.packed.as<const uint8_t>();
  uint8_t* out = args.out.as<uint8_t>();
  const bool real = n < spec.n;  // else padding along n, whose scales and zero points are 0
  float column_scale = 0.0f;
  if (real) std::memcpy(&column_scale, in + from.column_scale(n), 4);
  std::memcpy(out + to.column_scale(n), &column_scale, 4);
  ColumnSum<kFormat> sum;
  for (int64_t g = 0; g < spec.groups(); g++) {
    uint16_t half = 0;
    float scale = column_scale, zero = Codec::zero;
    if (spec.group_size) {
      if (real) std::memcpy(&half, in + from.group_scale(n, g), 2);
      std::memcpy(out + to.group_scale(n, g), &half, 2);
      scale *= float_from_float16(half);
    }
    if (spec.asymmetric) {
      half = 0;
      if (real) std::memcpy(&half, in + from.zero(n, g), 2);
      std::memcpy(out + to.zero(n, g), &half, 2);
      zero = float_from_float16(half);
    }
    const int64_t begin = g * spec.group_k(), end = begin + spec.group_k(), stop = smaller(spec.k, end);
    if constexpr (To::has_column_sum) {
      for (int64_t k = begin; real && k < stop; k++) sum.add(static_cast<int>(read_code<kFormat>(from, in, n, k)));
      sum.end_group(stop - begin, real ? zero : 0.0f, scale);
    }
    const float most = Codec::code_max, inside = zero < 0.0f ? 0.0f : zero > most ? most : zero;
    const uint32_t padding = spec.asymmetric ? static_cast<uint32_t>(inside) : Codec::code_of_zero;
    for (int64_t k = real ? stop : begin; k < smaller(to.stored_k(), end); k++)
      write_code<kFormat>(to, out, n, k, padding);
  }
  if constexpr (To::has_column_sum) {
    const float total = static_cast<float>(sum.total);
    std::memcpy(out + to.column_sum(n), &total, 4);
  }
}

template <Format kFormat, class From, class To>
void repack_columns(const RepackArgs& args, From from, To to, int64_t first) {
  const uint8_t* in = args.packed.as<const uint8_t>();
  uint8_t* out = args.out.as<uint8_t>();
  const int64_t end = smaller(to.stored_n(), first + kTaskColumns), real = smaller(end, args.spec.n), k_end = args.spec.k;
  static_assert(kTaskColumns % From::columns == 0 && kTaskColumns % To::columns == 0);
  std::memset(out + first / To::columns * to.row_bytes(), 0, ceil_div(end - first, To::columns) * to.row_bytes());
  if constexpr (!is_float(kFormat))
    for (int64_t n = first; n < end; n++) repack_scales<kFormat>(args, from, to, n);
  for (int64_t n = first; n < real; n++)
    for (int64_t k = 0; k < k_end; k++) write_code<kFormat>(to, out, n, k, read_code<kFormat>(from, in, n, k));
}

void run_repack(const RepackArgs& args) {
  with_format(args.spec.format, [&]<Format kFormat>() {
    with_layout(args.layout, args.spec, [&](auto from) {
      with_layout(args.out_layout, args.spec, [&](auto to) {
        parallel_for(ceil_div(to.stored_n(), kTaskColumns), num_threads(),
                     [&](int64_t task) { repack_columns<kFormat>(args, from, to, task * kTaskColumns); });
      });
    });
  });
}

constexpr Kernel<RepackArgs> kRows[] = {{LOWBIT_ROW("repack"), never_refuses<RepackArgs>, run_repack}};

}  // namespace

void quantize_repack_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
