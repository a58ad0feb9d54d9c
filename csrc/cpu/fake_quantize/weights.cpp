// SPDX-License-Identifier: Apache-2.0
// Rows of the ops fake_quantize and fake_quantize_backward. A task is some rows of the weight. The forward reads a row
// twice, the second time from cache; the backward uses the scales of the forward.
#include LOWBIT_ISA_HEADER

#include <cstring>

#include "core/arena.hpp"
#include "core/huge_pages.hpp"
#include "core/parallel.hpp"
#include "core/scratch.hpp"
#include "cpu/loops.hpp"
#include "cpu/quantize/group_scales.hpp"
#include "cpu/rows.hpp"
#include "cpu/simd/math.hpp"
#include "cpu/vector_io.hpp"
#include "ops/fake_quantize.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// The scratch memory of a task.
struct RowMemory {
  float* x;     // [padded_k], for a row of another dtype or without padding
  float* part;  // [groups]: scales divided by the factor of the row

  RowMemory(const WeightSpec& spec, Arena& arena)
      : x(arena.array<float>(spec.padded_k())), part(arena.array<float>(spec.groups())) {}
  static int64_t bytes(const WeightSpec& spec) {
    Arena counted;
    RowMemory(spec, counted);
    return counted.bytes;
  }
};

LOWBIT_INLINE const float* padded_row(const FakeQuantizeArgs& args, int64_t row, float* buffer) {
  const int64_t k = args.spec.k, padded = args.spec.padded_k();
  if (args.weight.dtype == DType::float32 && k == padded) return args.weight.as<const float>() + row * k;
  for (int64_t i = 0; i < padded; i += 16)
    store(buffer + i, i < k ? load_as_float(args.weight.data, args.weight.dtype, row * k + i, k - i) : set1(0.0f));
  return buffer;
}

// Scales of a row, rounded as for storage, with their quotients by the row's factor, and zero points. A scale is nan if
// a weight is not finite.
template <class Codec>
LOWBIT_INLINE float scales_of_row(const FakeQuantizeArgs& args, const float* x, float* scale, float* part,
                                  float* zero, int64_t row) {
  const WeightSpec& spec = args.spec;
  const int64_t groups = spec.groups();
  if (args.given_scale)
    for (int64_t g = 0; g < groups; g++) scale[g] = args.given_scale.as<const float>()[row * groups + g];
  else choose_scales<Codec>(spec, x, args.mapping, scale);
  for (int64_t g = 0; g < groups; g++) scale[g] += poison_of(x + g * spec.group_k(), length_of_group(spec, g));
  part[0] = 1.0f;
  const float of_row =
      round_scales(spec, scale, [&](int64_t g, uint16_t half) { part[g] = float_from_float16(half); });
  if (args.given_zero)
    for (int64_t g = 0; g < groups; g++)
      zero[g] = float_from_float16(float16_from_float(args.given_zero.as<const float>()[row * groups + g]));
  else choose_zeros(spec, x, scale, zero);
  return of_row;
}

template <class Codec>
LOWBIT_INLINE void round_row(const FakeQuantizeArgs& args, const RowMemory& memory, int64_t row) {
  const WeightSpec& spec = args.spec;
  const int64_t groups = spec.groups(), k = spec.k;
  const float most = static_cast<float>(code_max(spec.format));
  const float* x = padded_row(args, row, memory.x);
  float *scale = args.scale.as<float>() + row * groups, *zero = args.zero.as<float>() + row * groups;
  const f32x16 of_row = set1(scales_of_row<Codec>(args, x, scale, memory.part, zero, row));
  for (int64_t g = 0; g < groups; g++) {
    const f32x16 divisor = set1(scale[g] != 0.0f ? scale[g] : 1.0f), z = set1(zero[g]), part = set1(memory.part[g]);
    const int64_t end = smaller(k, (g + 1) * spec.group_k());
    for (int64_t i = g * spec.group_k(); i < end; i += 16) {
      const i32x16 code = nearest_code<Codec>(add(div(load(x + i), divisor), z), most);
      if (args.out.dtype == DType::uint8) {
        uint8_t bytes[16];
        store_u8(bytes, code);
        std::memcpy(args.out.as<uint8_t>() + row * k + i, bytes, static_cast<std::size_t>(smaller(16, k - i)));
      } else {  // rounded like the product in dequantize
        const f32x16 value = mul(mul(sub(Codec::level_of(code), z), part), of_row);
        store_from_float(args.out.data, args.out.dtype, row * k + i, k - i, value);
      }
    }
  }
}

// A mask of the v = weight / scale + zero that are not clipped to the first or last code.
template <class Codec>
LOWBIT_INLINE i32x16 not_clipped(f32x16 v, float code_max) {
  if constexpr (Codec::kind == CodecKind::lookup) {
    return at_least(set1(Codec::range * (1 + 0x1p-10f)), abs(v));
  } else {
    const f32x16 code = to_float(to_int(v));
    return bit_and(at_least(code, set1(0.0f)), at_least(set1(code_max), code));
  }
}

LOWBIT_INLINE f32x16 where(i32x16 mask, f32x16 a) { return float_of(bit_and(mask, bits_of(a))); }  // else 0

template <class Codec, bool kScale>
LOWBIT_INLINE void gradient_of_row(const FakeQuantizeBackwardArgs& args, int64_t row) {
  const auto& [place, spec, grad, weight, scales, zeros, grad_scale] = args;
  const int64_t groups = spec.groups(), k = spec.k;
  const float most = static_cast<float>(code_max(spec.format));
  for (int64_t g = 0; g < groups; g++) {
    const float scale = scales.template as<const float>()[row * groups + g];
    const f32x16 divisor = set1(scale != 0.0f ? scale : 1.0f),
                 z = set1(zeros.template as<const float>()[row * groups + g]);
    f32x16 total = set1(0.0f);
    const int64_t end = smaller(k, (g + 1) * spec.group_k());
    for (int64_t i = g * spec.group_k(); i < end; i += 16) {
      const int64_t at = row * k + i, count = k - i;
      const f32x16 slope = load_as_float(grad.data, grad.dtype, at, count),
                   ratio = div(load_as_float(weight.data, weight.dtype, at, count), divisor), v = add(ratio, z);
      const i32x16 inside = not_clipped<Codec>(v, most);
      store_from_float(grad.data, grad.dtype, at, count, where(inside, slope));
      if constexpr (kScale) {
        const f32x16 level = Codec::level_of(nearest_code<Codec>(v, most));
        total = fma(slope, sub(sub(level, z), where(inside, ratio)), total);
      }
    }
    if constexpr (kScale) grad_scale.template as<float>()[row * groups + g] = sum(total);
  }
}

// Runs body.operator()<Codec>(row) for all rows, in parallel.
template <class Body>
LOWBIT_INLINE void for_each_row(const WeightSpec& spec, Body&& body) {
  const RowTiles tasks(spec.n, larger(1, kSerialProducts / 16 / spec.k));
  with_format(spec.format, [&]<Format kFormat>() {
    using Codec = codec_of<integers_as_int8(kFormat)>;
    if constexpr (Codec::kind != CodecKind::floating)
      parallel_for(tasks.count, threads_worth(8 * spec.n * spec.k), [&](int64_t task) {
        for (int64_t row = tasks.begin(task); row < tasks.begin(task + 1); row++) body.template operator()<Codec>(row);
      });
  });
}

void run_fake_quantize(const FakeQuantizeArgs& args) {
  prefer_huge_pages(args.out.data, bytes_of(args.out));
  for_each_row(args.spec, [&]<class Codec>(int64_t row) {
    const Scratch taken(RowMemory::bytes(args.spec));
    Arena arena = taken.arena();
    round_row<Codec>(args, RowMemory(args.spec, arena), row);
  });
}

void run_fake_quantize_backward(const FakeQuantizeBackwardArgs& args) {
  for_each_row(args.spec, [&]<class Codec>(int64_t row) {
    if (args.grad_scale) gradient_of_row<Codec, true>(args, row);
    else gradient_of_row<Codec, false>(args, row);
  });
}

constexpr Kernel<FakeQuantizeArgs> kForwardRows[] = {
    {LOWBIT_ROW("fake_quantize"), never_refuses<FakeQuantizeArgs>, run_fake_quantize}};
constexpr Kernel<FakeQuantizeBackwardArgs> kBackwardRows[] = {
    {LOWBIT_ROW("fake_quantize_backward"), never_refuses<FakeQuantizeBackwardArgs>, run_fake_quantize_backward}};

}  // namespace

void fake_quantize_weights_rows(Backend& backend) { add(backend, kForwardRows), add(backend, kBackwardRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
