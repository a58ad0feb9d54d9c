// SPDX-License-Identifier: Apache-2.0
// The row of the op float8_cast. With one scale per row, a task reads each row twice, the second time from cache; else
// the whole matrix is read twice, as codes need the largest magnitude first.
#include LOWBIT_ISA_HEADER

#include <cmath>

#include "core/arena.hpp"
#include "core/huge_pages.hpp"
#include "core/parallel.hpp"
#include "core/scratch.hpp"
#include "cpu/loops.hpp"
#include "cpu/rows.hpp"
#include "cpu/vector_io.hpp"
#include "formats/scales.hpp"
#include "ops/float8_cast.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// The spacing of float8 numbers near 2^e is 2^e / 2^mantissa_bits, and below `normal` that of `normal`. Adding and
// subtracting 1.5 * 2^23 times the spacing rounds to the nearest, ties to even.
struct Float8 {
  float largest, normal, rounder;
  explicit Float8(bool e5m2)
      : largest(e5m2 ? 57344.0f : 448.0f), normal(e5m2 ? 0x1p-14f : 0x1p-6f), rounder(e5m2 ? 0x1.8p21f : 0x1.8p20f) {}
};

struct Scale {
  float scale, step, divisor;  // step = 1 / power
  static Scale of(const Float8CastArgs& args, int32_t amax_bits) {
    constexpr double kSmallest = 1e-12;
    if (amax_bits >= 0x7f800000) return {NAN, NAN, NAN};
    const double amax = static_cast<double>(float_from_bits(static_cast<uint32_t>(amax_bits)));
    const double range = amax > kSmallest ? amax : kSmallest;
    const auto scale = static_cast<float>(static_cast<double>(Float8(args.e5m2).largest) / range);
    const float below = power_of_two_below(scale);
    if (args.power_of_2) return {below, 1 / below, 1.0f};
    return {scale, 0.5f / below, 0.5f * scale / below};
  }
};

LOWBIT_INLINE i32x16 magnitude(const TensorView& x, int64_t at, int64_t count) {
  return bits_of(abs(load_as_float(x.data, x.dtype, at, count)));  // ordered as integers, nan above inf
}

LOWBIT_INLINE int32_t largest_magnitude(const TensorView& x, int64_t begin, int64_t end) {
  i32x16 most[4] = {set1(0), set1(0), set1(0), set1(0)};
  int64_t i = begin;
  for (; i + 64 <= end; i += 64)
    for (int part = 0; part < 4; part++) most[part] = max(most[part], magnitude(x, i + 16 * part, 16));
  for (; i < end; i += 16) most[0] = max(most[0], magnitude(x, i, end - i));
  return largest(max(max(most[0], most[1]), max(most[2], most[3])));
}

// most [columns, up to a whole vector]
LOWBIT_INLINE void largest_of_columns(const TensorView& x, int64_t begin, int64_t end, int32_t* most) {
  const int64_t columns = x.size(1);
  for (int64_t j = 0; j < columns; j += 16) store_i32(most + j, set1(0));
  for (int64_t row = begin; row < end; row++)
    for (int64_t j = 0; j < columns; j += 16)
      store_i32(most + j, max(load_i32(most + j), magnitude(x, row * columns + j, columns - j)));
}

template <class ScaleAt>
LOWBIT_INLINE void cast_row(const Float8CastArgs& args, int64_t row, ScaleAt&& scale_at) {
  const Float8 float8(args.e5m2);
  const TensorView &x = args.x, &values = args.values;
  const int64_t columns = x.size(1);
  for (int64_t j = 0; j < columns; j += 16) {
    const int64_t at = row * columns + j, count = columns - j;
    const auto [scale, step] = scale_at(j);
    const f32x16 v = mul(load_as_float(x.data, x.dtype, at, count), scale);
    const f32x16 power = float_of(bit_and(bits_of(v), set1(0x7f800000)));
    const f32x16 rounder = mul(max(power, set1(float8.normal)), set1(float8.rounder));
    store_from_float(values.data, values.dtype, at, count, mul(sub(add(v, rounder), rounder), step));
  }
}

struct Vectors { f32x16 scale, step; };

void cast_with_scales_of_rows(const Float8CastArgs& args, const RowTiles& tasks, int threads) {
  const int64_t columns = args.x.size(1);
  parallel_for(tasks.count, threads, [&](int64_t task) {
    for (int64_t row = tasks.begin(task); row < tasks.begin(task + 1); row++) {
      const Scale scale = Scale::of(args, largest_magnitude(args.x, row * columns, (row + 1) * columns));
      args.divisor.as<float>()[row] = scale.divisor;
      cast_row(args, row, [&](int64_t) { return Vectors{set1(scale.scale), set1(scale.step)}; });
    }
  });
}

void cast_with_one_scale(const Float8CastArgs& args, const RowTiles& tasks, int threads) {
  const int64_t columns = args.x.size(1);
  const Scratch memory(tasks.count * static_cast<int64_t>(sizeof(int32_t)));
  auto* const most = memory.as<int32_t>();
  parallel_for(tasks.count, threads, [&](int64_t task) {
    most[task] = largest_magnitude(args.x, tasks.begin(task) * columns, tasks.begin(task + 1) * columns);
  });
  int32_t of_all = 0;
  for (int64_t task = 0; task < tasks.count; task++) of_all = most[task] > of_all ? most[task] : of_all;
  const Scale scale = Scale::of(args, of_all);
  *args.divisor.as<float>() = scale.divisor;
  parallel_for(tasks.count, threads, [&](int64_t task) {
    for (int64_t row = tasks.begin(task); row < tasks.begin(task + 1); row++)
      cast_row(args, row, [&](int64_t) { return Vectors{set1(scale.scale), set1(scale.step)}; });
  });
}

void cast_with_scales_of_columns(const Float8CastArgs& args, const RowTiles& tasks, int threads) {
  const int64_t rows = args.x.size(0), columns = args.x.size(1), padded = round_up(columns, 16);
  const RowTiles parts(rows, larger(1, ceil_div(rows, 4 * threads)));  // few, as each part has its own row of maxima
  auto memory = [&](Arena arena, int32_t*& most, float*& scale, float*& step) {
    most = arena.array<int32_t>(parts.count * padded), scale = arena.array<float>(padded);
    step = arena.array<float>(padded);
    return arena.bytes;
  };
  int32_t* most;
  float *scale, *step;
  const Scratch taken(memory({}, most, scale, step));
  memory(taken.arena(), most, scale, step);
  parallel_for(parts.count, threads, [&](int64_t part) {
    largest_of_columns(args.x, parts.begin(part), parts.begin(part + 1), most + part * padded);
  });
  for (int64_t j = 0; j < padded; j++) {
    int32_t of_column = 0;
    for (int64_t part = 0; part < parts.count; part++)
      of_column = most[part * padded + j] > of_column ? most[part * padded + j] : of_column;
    const Scale chosen = Scale::of(args, of_column);
    scale[j] = chosen.scale, step[j] = chosen.step;
    if (j < columns) args.divisor.as<float>()[j] = chosen.divisor;
  }
  parallel_for(tasks.count, threads, [&](int64_t task) {
    for (int64_t row = tasks.begin(task); row < tasks.begin(task + 1); row++)
      cast_row(args, row, [&](int64_t j) { return Vectors{load(scale + j), load(step + j)}; });
  });
}

void run_float8_cast(const Float8CastArgs& args) {
  const int64_t rows = args.x.size(0), columns = args.x.size(1);
  const RowTiles tasks(rows, larger(1, kSerialProducts / 16 / larger(1, columns)));
  const int threads = threads_worth(8 * args.x.numel());
  prefer_huge_pages(args.values.data, bytes_of(args.values));
  if (args.scale_of == ScaleOf::row) cast_with_scales_of_rows(args, tasks, threads);
  else if (args.scale_of == ScaleOf::column) cast_with_scales_of_columns(args, tasks, threads);
  else cast_with_one_scale(args, tasks, threads);
}

constexpr Kernel<Float8CastArgs> kRows[] = {
    {LOWBIT_ROW("float8_cast"), never_refuses<Float8CastArgs>, run_float8_cast}};

}  // namespace

void fake_quantize_float8_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
