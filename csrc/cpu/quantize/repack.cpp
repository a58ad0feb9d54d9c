// SPDX-License-Identifier: Apache-2.0
// The row of the op repack: a packed weight from any layout to any other (formats/layout.hpp), or from blocks of MXFP4.
// Codes, scales and zero points are preserved exactly. A task is 16 columns, which are whole rows in every layout.
#include LOWBIT_ISA_HEADER

#include <type_traits>

#include "core/parallel.hpp"
#include "cpu/quantize/mxfp4.hpp"
#include "cpu/rows.hpp"
#include "formats/layout_codes.hpp"
#include "ops/quantize.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kTaskColumns = 16;  // a multiple of the columns per unit of every layout

// An entry of a scale or zero section; 0 for padding along n.
template <class T>
LOWBIT_INLINE T copy_entry(const RepackArgs& args, int64_t Sections::*section, int64_t n, int64_t g) {
  const Sections &from = args.from, &to = args.to;
  T value = 0;
  if (n < args.spec.n)
    std::memcpy(&value, args.packed.as<const uint8_t>() + from.at(from.*section, sizeof(T), n, g), sizeof(T));
  std::memcpy(args.out.as<uint8_t>() + to.at(to.*section, sizeof(T), n, g), &value, sizeof(T));
  return value;
}

// Codes of 4 bits from "row-major" to the layout of the kernels, as weights of checkpoints come: 64 at a time they take a
// quarter of the time that they take one by one.
template <Format kFormat, class From, class To>
inline constexpr bool kIsNibbles = bits(kFormat) == 4 && !is_float(kFormat) && std::is_same_v<From, RowMajorLayout> &&
                                   std::is_same_v<To, PanelLayout>;

// Scales, zero points and sum of a column of codes, with its padding along k.
template <Format kFormat, class From, class To>
void repack_scales(const RepackArgs& args, int64_t n) {
  using Codec = codec_of<kFormat>;
  const WeightSpec spec = args.spec;
  const Sections from = args.from, to = args.to;
  uint8_t* out = args.out.as<uint8_t>();
  const bool real = n < spec.n;  // false: padding along n
  const float column_scale = copy_entry<float>(args, &Sections::column_scale, n, 0);
  ColumnSum<kFormat> sum;
  for (int64_t g = 0; g < spec.groups(); g++) {
    float scale = 1, zero = Codec::zero;
    if (spec.group_size) scale = float_from_float16(copy_entry<uint16_t>(args, &Sections::group_scale, n, g));
    if (spec.asymmetric) zero = float_from_float16(copy_entry<uint16_t>(args, &Sections::zero, n, g));
    const int64_t begin = g * spec.group_k(), end = begin + spec.group_k(), stop = real ? smaller(spec.k, end) : begin;
    if (to.column_sum != Sections::none) {
      int64_t k = begin;
      if constexpr (kFormat == Format::int4 && kIsNibbles<kFormat, From, To>) {  // groups begin with a byte
        const uint8_t* codes = args.packed.as<const uint8_t>() + from.row(n) + from.codes;
        for (; k + 1 < stop; k += 2) sum.levels += (codes[k / 2] & 15) + (codes[k / 2] >> 4);
      }
      for (; k < stop; k++)
        sum.add(static_cast<int>(read_code<kFormat, From>(from, args.packed.as<const uint8_t>(), n, k)));
      sum.end_group(stop - begin, zero, scale);
    }
    const float most = Codec::code_max, inside = zero < 0.0f ? 0.0f : zero > most ? most : zero;
    const uint32_t padding = spec.asymmetric ? static_cast<uint32_t>(inside) : Codec::code_of_zero;
    for (int64_t k = stop; k < smaller(to.stored_k, end); k++) write_code<kFormat, To>(to, out, n, k, padding);
  }
  if (to.column_sum == Sections::none) return;
  const float total = sum.total(column_scale);
  std::memcpy(out + to.at(to.column_sum, sizeof total, n), &total, sizeof total);
}

template <Format kFormat, class From, class To>
void repack_columns(const RepackArgs& args, int64_t first) {
  const Sections from = args.from, to = args.to;
  const uint8_t* in = args.packed.as<const uint8_t>();
  uint8_t* out = args.out.as<uint8_t>();
  const int64_t end = smaller(to.stored_n, first + kTaskColumns), real = smaller(end, args.spec.n), k_end = args.spec.k;
  std::memset(out + to.row(first), 0, ceil_div(end - first, to.columns) * to.row_bytes);
  if constexpr (!is_float(kFormat))
    for (int64_t n = first; n < end; n++) repack_scales<kFormat, From, To>(args, n);
  for (int64_t n = first; n < real; n++) {
    int64_t k = 0;
    if constexpr (kIsNibbles<kFormat, From, To>) {
      uint8_t* codes = out + to.row(n) + to.codes;
      for (; k + kTileK <= k_end; k += kTileK)
        write_nibbles<false>(in + from.row(n) + from.codes + k / 2, in + from.row(n) + from.codes + k / 2 + 16,
                             codes + k / 2 * kPanelColumns, n % kPanelColumns);
    }
    for (; k < k_end; k++) write_code<kFormat, To>(to, out, n, k, read_code<kFormat, From>(from, in, n, k));
  }
}

void run_repack(const RepackArgs& args) {
  if (args.blocks) return pack_blocks(args);
  with_format(args.spec.format, [&]<Format kFormat>() {
    with_layout(args.layout, [&]<class From>() {
      with_layout(args.out_layout, [&]<class To>() {
        parallel_for(ceil_div(args.to.stored_n, kTaskColumns), threads_worth(64 * args.spec.n * args.spec.k),
                     [&](int64_t task) { repack_columns<kFormat, From, To>(args, task * kTaskColumns); });
      });
    });
  });
}

std::string_view refuses_gguf(const RepackArgs& args) { return args.gguf ? "reads no blocks of GGUF" : ""; }

constexpr Kernel<RepackArgs> kRows[] = {{LOWBIT_ROW("repack"), refuses_gguf, run_repack}};

}  // namespace

void quantize_repack_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
