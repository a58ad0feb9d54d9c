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

// One head of one token: normalized if there is a weight, then rotated.
void rotate(const RopeAppendArgs& args, const TensorView& weight, Row cos, Row sin, Row from, Row to) {
  const int64_t e = args.e(), half = args.cos.size(2) / 2;
  f32x16 scale = set1(1.0f);
  if (weight) scale = reciprocal_root_mean_square(from.of.data, from.of.dtype, from.at, e, args.eps);
  const f32x16 offset = set1(static_cast<float>(args.offset));
  const auto normalized = [&](int64_t i, int64_t count) {
    const f32x16 value = from.load(i, count);
    if (!weight) return value;
    return mul(mul(value, scale), add(load_as_float(weight.data, weight.dtype, i, count), offset));
  };
  for (int64_t i = 0; i < half; i += 16) {
    const int64_t count = half - i;
    const f32x16 low = normalized(i, count), high = normalized(half + i, count);
    to.store(i, count, sub(mul(low, cos.load(i, count)), mul(high, sin.load(i, count))));
    to.store(half + i, count, fma(high, cos.load(half + i, count), mul(low, sin.load(half + i, count))));
  }
  for (int64_t i = 2 * half; i < e; i += 16) to.store(i, e - i, normalized(i, e - i));
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
    for (int64_t h = 0; h < heads; h++)
      rotate(args, args.q_weight, cos, sin, row_of(qkv, b, t, h), row_of(args.rotated, b, h, t));
    for (int64_t h = 0; h < kv_heads; h++) {
      rotate(args, args.k_weight, cos, sin, row_of(qkv, b, t, heads + h), row_of(args.keys, b, h, at));
      append(row_of(qkv, b, t, heads + kv_heads + h), row_of(args.values, b, h, at), args.e());
    }
  });
}

constexpr Kernel<RopeAppendArgs> kRows[] = {
    {LOWBIT_ROW("rope_append"), never_refuses<RopeAppendArgs>, run_rope_append}};

}  // namespace

void rope_append_rope_append_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
