// SPDX-License-Identifier: Apache-2.0
// The row of the op int8_pack. A task is some panels; it reads its part of the matrix twice, for the scales and for the
// codes. A panel stores four k of 16 columns side by side, so a matrix with a contiguous transpose needs no
// transposing, and other matrices are transposed in registers, block by block.
#include LOWBIT_ISA_HEADER

#include <cmath>
#include <cstring>

#include "core/huge_pages.hpp"
#include "core/parallel.hpp"
#include "cpu/loops.hpp"
#include "cpu/rows.hpp"
#include "cpu/simd/math.hpp"
#include "cpu/vector_io.hpp"
#include "formats/layout.hpp"
#include "formats/scales.hpp"
#include "ops/int8_pack.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// For a transposed matrix: 16 columns alone are one cache line per row, and each row is on another page.
constexpr int64_t kPanelsOfTask = 8;

struct Ranges {
  f32x16 low, high, poison;
  LOWBIT_INLINE Ranges() : low(set1(0.0f)), high(set1(0.0f)), poison(set1(0.0f)) {}
  LOWBIT_INLINE void add(f32x16 w) {
    low = min(low, w), high = max(high, w), poison = fma(w, set1(0.0f), poison);
  }
};

// The scales of 16 columns while their codes are made, and the sums of the codes.
struct PanelColumns {
  alignas(64) float scale[16], divisor[16];
  i32x16 sum = set1(int32_t{0});

  LOWBIT_INLINE void choose(int64_t column, float low, float high, float poison) {
    const float of_range = scale_of_range<Int8>(low, high, Mapping::symmetric_no_clipping_err, 255.0f);
    const bool finite = poison == 0.0f;
    scale[column] = finite ? of_range : NAN, divisor[column] = finite && of_range != 0.0f ? of_range : 1.0f;
  }
};

// Four k of 16 columns; padding from `count` on.
LOWBIT_INLINE i32x16 four_codes(const f32x16 (&w)[4], int64_t count, f32x16 divisor, i32x16& sum) {
  i32x16 word = set1(int32_t{0});
  unroll<4>([&](auto i) {
    const i32x16 code = bit_and(nearest_code<Int8>(add(div(w[i], divisor), set1(128.0f)), 255.0f), set1(255));
    if (i < count) sum = add(sum, code);
    word = bit_or(word, shift_left<8 * i>(code));
  });
  return word;
}

LOWBIT_INLINE void begin_panel(const PanelColumns& columns, uint8_t* panel) {
  std::memcpy(panel, columns.scale, sizeof columns.scale);  // the sums are stored at the end
}

LOWBIT_INLINE void end_panel(const WeightSpec& spec, const PanelColumns& columns, uint8_t* panel) {
  alignas(64) int32_t sum[16];
  store_i32(sum, columns.sum);
  for (int64_t column = 0; column < 16; column++) {
    ColumnSum<Format::int8> total;
    total.levels = sum[column];
    total.end_group(spec.k, 128.0f, 1.0f);
    reinterpret_cast<float*>(panel + spec.column_sum_at())[column] = total.total(columns.scale[column]);
  }
}

void pack_in_order(const Int8PackArgs& args, int64_t index) {
  const WeightSpec& spec = args.spec;
  const TensorView& weight = args.weight;
  const int64_t rows = smaller(16, spec.n - index * 16), first = index * 16 * spec.k;
  uint8_t* panel = args.packed.as<uint8_t>() + index * spec.panel_bytes();
  PanelColumns columns;
  for (int64_t column = 0; column < 16; column++) {
    Ranges range;
    for (int64_t k = 0; column < rows && k < spec.k; k += 16)
      range.add(load_as_float(weight.data, weight.dtype, first + column * spec.k + k, spec.k - k));
    columns.choose(column, -largest(sub(set1(0.0f), range.low)), largest(range.high), sum(range.poison));
  }
  begin_panel(columns, panel);
  const f32x16 divisor = load(columns.divisor);
  alignas(64) float block[2][16 * 16] = {};
  uint8_t* out = panel + spec.codes_at();
  for (int64_t k = 0; k < spec.padded_k(); k += 16) {
    for (int64_t column = 0; column < rows; column++)
      store(block[0] + column * 16, k < spec.k ? load_as_float(weight.data, weight.dtype,
                                                               first + column * spec.k + k, spec.k - k)
                                               : set1(0.0f));
    transpose_16x16(block[0], 16, block[1], 16);
    for (int64_t i = 0; i < 16; i += 4, out += 64) {
      const float* four = block[1] + i * 16;
      const f32x16 w[4] = {load(four), load(four + 16), load(four + 32), load(four + 48)};
      store_i32(reinterpret_cast<int32_t*>(out), four_codes(w, spec.k - k - i, divisor, columns.sum));
    }
  }
  end_panel(spec, columns, panel);
}

void pack_transposed(const Int8PackArgs& args, int64_t begin, int64_t end) {
  const WeightSpec& spec = args.spec;
  const TensorView& weight = args.weight;
  const int64_t count = end - begin;
  const auto part = [&](int64_t k, int64_t panel) {
    const int64_t column = (begin + panel) * 16;
    return k < spec.k ? load_as_float(weight.data, weight.dtype, k * spec.n + column, spec.n - column) : set1(0.0f);
  };
  Ranges ranges[kPanelsOfTask];
  PanelColumns columns[kPanelsOfTask];
  for (int64_t k = 0; k < spec.k; k++)
    for (int64_t panel = 0; panel < count; panel++) ranges[panel].add(part(k, panel));
  uint8_t* first = args.packed.as<uint8_t>() + begin * spec.panel_bytes();
  for (int64_t panel = 0; panel < count; panel++) {
    alignas(64) float low[16], high[16], poison[16];
    store(low, ranges[panel].low), store(high, ranges[panel].high), store(poison, ranges[panel].poison);
    for (int64_t column = 0; column < 16; column++)
      columns[panel].choose(column, low[column], high[column], poison[column]);
    begin_panel(columns[panel], first + panel * spec.panel_bytes());
  }
  for (int64_t k = 0; k < spec.padded_k(); k += 4)
    for (int64_t panel = 0; panel < count; panel++) {
      const f32x16 w[4] = {part(k, panel), part(k + 1, panel), part(k + 2, panel), part(k + 3, panel)};
      const i32x16 word = four_codes(w, spec.k - k, load(columns[panel].divisor), columns[panel].sum);
      store_i32(reinterpret_cast<int32_t*>(first + panel * spec.panel_bytes() + spec.codes_at() + k * 16), word);
    }
  for (int64_t panel = 0; panel < count; panel++)
    end_panel(spec, columns[panel], first + panel * spec.panel_bytes());
}

void run_int8_pack(const Int8PackArgs& args) {
  const int threads = threads_worth(8 * args.spec.n * args.spec.k);
  prefer_huge_pages(args.packed.data, bytes_of(args.packed));
  const RowTiles tasks(args.spec.panels(), kPanelsOfTask);
  parallel_for(tasks.count, threads, [&](int64_t task) {
    if (args.transposed()) return pack_transposed(args, tasks.begin(task), tasks.begin(task + 1));
    for (int64_t panel = tasks.begin(task); panel < tasks.begin(task + 1); panel++) pack_in_order(args, panel);
  });
}

constexpr Kernel<Int8PackArgs> kRows[] = {{LOWBIT_ROW("int8_pack"), never_refuses<Int8PackArgs>, run_int8_pack}};

}  // namespace

void quantize_int8_pack_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
