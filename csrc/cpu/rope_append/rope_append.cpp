// SPDX-License-Identifier: Apache-2.0
// The row of the op rope_append. A task is a token: its heads share cos and sin.
#include LOWBIT_ISA_HEADER

#include "ops/rope_append.hpp"

#include <cstring>

#include "core/parallel.hpp"
#include "cpu/loops.hpp"
#include "cpu/root_mean_square.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

struct Row {  // elements from `at` on
  const TensorView& of;
  int64_t at;
  LOWBIT_INLINE f32x16 load(int64_t i, int64_t count) const { return load_as_float(of.data, of.dtype, at + i, count); }
  LOWBIT_INLINE void store(int64_t i, int64_t count, f32x16 value) const {
    store_from_float(of.data, of.dtype, at + i, count, value);
  }
};

LOWBIT_INLINE Row row_of(const TensorView& of, int64_t i, int64_t j, int64_t k) {
  return {of, i * of.stride[0] + j * of.stride[1] + k * of.stride[2]};
}

LOWBIT_INLINE Row angles_of(const TensorView& of, int64_t batch, int64_t token) {
  return {of, (of.size(0) == 1 ? 0 : batch * of.stride[0]) + token * of.stride[1]};
}

// The norm of a head: its weight begins at weight_at, and scale is 1 / sqrt(mean(x^2) + eps).
struct HeadNorm {
  const TensorView& weight;
  int64_t weight_at;
  f32x16 scale, offset;
  LOWBIT_INLINE f32x16 of(f32x16 value, int64_t i, int64_t count) const {
    return mul(mul(value, scale), add(load_as_float(weight.data, weight.dtype, weight_at + i, count), offset));
  }
};

// Rotates the pairs 2i and 2i + 1 of 32 columns from `at` on, of which there are 2 half.
template <class Value>
LOWBIT_INLINE void rotate_neighbours(Rotation rotation, Row cos, Row sin, Row to, int64_t at, int64_t half,
                                     Value value) {
  alignas(64) float x[32], c[32], s[32], y[32];
  const bool of_halves = rotation != Rotation::neighbours, to_halves = rotation == Rotation::neighbours_to_halves;
  const int64_t count = 2 * half - at, more = count - 16;
  store(x, value(at, count)), store(x + 16, more > 0 ? value(at + 16, more) : set1(0.0f));
  const int64_t angle = of_halves ? at / 2 : at, angles = of_halves ? count / 2 : count;
  store(c, cos.load(angle, angles)), store(s, sin.load(angle, angles));
  if (!of_halves && more > 0) store(c + 16, cos.load(angle + 16, more)), store(s + 16, sin.load(angle + 16, more));
  for (int i = 0; i < 16; i++) {
    const int low = of_halves ? i : 2 * i, high = of_halves ? i : 2 * i + 1;
    if (2 * i >= count) break;
    y[to_halves ? i : 2 * i] = x[2 * i] * c[low] - x[2 * i + 1] * s[low];
    y[to_halves ? 16 + i : 2 * i + 1] = x[2 * i + 1] * c[high] + x[2 * i] * s[high];
  }
  if (to_halves) {
    to.store(at / 2, count / 2, load(y)), to.store(half + at / 2, count / 2, load(y + 16));
    return;
  }
  to.store(at, count, load(y));
  if (more > 0) to.store(at + 16, more, load(y + 16));
}

// One head of one token: normalized if there is a weight, then rotated; or rotated, then normalized.
void rotate(const RopeAppendArgs& args, HeadNorm norm, Row cos, Row sin, Row from, Row to) {
  const int64_t e = args.e(), half = args.cos.size(2) / 2;
  const bool before = norm.weight && !args.norm_behind;
  const auto value = [&](int64_t i, int64_t count) {
    return before ? norm.of(from.load(i, count), i, count) : from.load(i, count);
  };
  if (args.rotation == static_cast<int64_t>(Rotation::halves)) {
    for (int64_t i = 0; i < half; i += 16) {
      const int64_t count = half - i;
      const f32x16 low = value(i, count), high = value(half + i, count);
      to.store(i, count, sub(mul(low, cos.load(i, count)), mul(high, sin.load(i, count))));
      to.store(half + i, count, fma(high, cos.load(half + i, count), mul(low, sin.load(half + i, count))));
    }
  } else {
    const auto rotation = static_cast<Rotation>(args.rotation);
    for (int64_t i = 0; i < 2 * half; i += 32) rotate_neighbours(rotation, cos, sin, to, i, half, value);
  }
  for (int64_t i = 2 * half; i < e; i += 16) to.store(i, e - i, value(i, e - i));
  if (!norm.weight || !args.norm_behind) return;
  norm.scale = reciprocal_root_mean_square(to.of.data, to.of.dtype, to.at, e, args.eps);
  for (int64_t i = 0; i < e; i += 16) to.store(i, e - i, norm.of(to.load(i, e - i), i, e - i));
}

// All query heads of a token, or all key heads: `from(h)` is head h of qkv, `to(h)` its place.
template <class From, class To>
LOWBIT_INLINE void rotate_heads(const RopeAppendArgs& args, const TensorView& weight, int64_t heads, Row cos, Row sin,
                                From from, To to) {
  const int64_t e = args.e();
  const bool of_all = weight && weight.size(0) != e;  // one norm of all heads
  const auto scale_of = [&](Row row, int64_t n) {
    return reciprocal_root_mean_square(row.of.data, row.of.dtype, row.at, n, args.eps);
  };
  HeadNorm norm{weight, 0, set1(1.0f), set1(static_cast<float>(args.offset))};
  if (of_all) norm.scale = scale_of(from(0), heads * e);
  for (int64_t h = 0; h < heads; h++) {
    if (of_all) norm.weight_at = h * e;
    else if (weight && !args.norm_behind) norm.scale = scale_of(from(h), e);
    rotate(args, norm, cos, sin, from(h), to(h));
  }
}

void append(Row from, Row to, int64_t e) {
  const auto bytes = static_cast<int64_t>(size_of(from.of.dtype));
  std::memcpy(to.of.as<char>() + to.at * bytes, from.of.as<const char>() + from.at * bytes,
              static_cast<std::size_t>(e * bytes));
}

void run_rope_append(const RopeAppendArgs& args) {
  const TensorView& qkv = args.qkv;
  const int64_t heads = args.heads(), kv_heads = args.kv_heads();
  parallel_for(args.batch() * args.tokens(), threads_worth(qkv.numel()), [&](int64_t task) {
    const int64_t b = task / args.tokens(), t = task % args.tokens(), at = args.start + t;
    const Row cos = angles_of(args.cos, b, t), sin = angles_of(args.sin, b, t);
    // Where the heads are in qkv: all queries, each with its gate if there are gates, all keys, all values; or, for
    // each key, its queries, itself, its value.
    const int64_t each = args.gated ? 2 : 1, queries = args.grouped ? heads / kv_heads : each * heads;
    const int64_t step = args.grouped ? queries + 2 : 1;
    const int64_t key_after = args.grouped ? 1 : kv_heads;
    const auto query_of = [&](int64_t h) {
      return row_of(qkv, b, t, args.grouped ? h / queries * step + h % queries : each * h);
    };
    const auto key_of = [&](int64_t h) { return row_of(qkv, b, t, queries + h * step); };
    rotate_heads(args, args.q_weight, heads, cos, sin, query_of,
                 [&](int64_t h) { return row_of(args.rotated, b, h, t); });
    rotate_heads(args, args.k_weight, kv_heads, cos, sin, key_of,
                 [&](int64_t h) { return row_of(args.keys, b, h, at); });
    for (int64_t h = 0; h < kv_heads; h++)
      append(row_of(qkv, b, t, queries + key_after + h * step), row_of(args.values, b, h, at), args.e());
  });
}

constexpr Kernel<RopeAppendArgs> kRows[] = {
    {LOWBIT_ROW("rope_append"), never_refuses<RopeAppendArgs>, run_rope_append}};

}  // namespace

void rope_append_rope_append_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
