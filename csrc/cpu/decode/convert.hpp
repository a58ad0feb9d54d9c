// SPDX-License-Identifier: Apache-2.0
// Conversion of rows of keys and values to codes and back.
#pragma once

#include "cpu/decode/split.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kRowsPerTask = 64;

template <class Body>
void for_each_head_row(const TensorView& tensor, Body&& body) {  // calls body(b, h, l), in tasks of several rows
  const int64_t length = tensor.size(2), rows = tensor.size(0) * tensor.size(1) * length,
                blocks = ceil_div(rows, kRowsPerTask);
  parallel_for(blocks, threads_worth(8 * tensor.numel()), [&](int64_t block) {
    for (int64_t row = block * kRowsPerTask; row < smaller(rows, (block + 1) * kRowsPerTask); row++)
      body(row / length / tensor.size(1), row / length % tensor.size(1), row % length);
  });
}

template <class T>
LOWBIT_INLINE T* row_of(const TensorView& tensor, int64_t b, int64_t h, int64_t l) {
  return tensor.as<T>() + b * tensor.stride[0] + h * tensor.stride[1] + l * tensor.stride[2];
}

// Stores the scale, rounded to its dtype, and returns the rounded value.
LOWBIT_INLINE float store_scale(const TensorView& scale, int64_t b, int64_t h, int64_t l, int64_t g, float value) {
  if (scale.dtype == DType::float32) return row_of<float>(scale, b, h, l)[g] = value;
  return float_from_float16(row_of<uint16_t>(scale, b, h, l)[g] = float16_from_float(value));
}

// q = clamp(round(x / scale)) of `count` elements, as int32.
LOWBIT_INLINE void quantize_group(const float* x, int64_t count, float scale, float low, float high, int32_t* q) {
  const f32x16 inverse = set1(scale != 0.0f && scale == scale ? 1.0f / scale : 0.0f);
  for (int64_t i = 0; i < count; i += 16) {
    const f32x16 bounded = min(max(mul(load(x + i), inverse), set1(low)), set1(high));
    store_i32(reinterpret_cast<float*>(q + i), to_int(bounded));
  }
}

// The element of largest magnitude, with its sign; nan if any element is nan or inf.
LOWBIT_INLINE float extreme(const float* x, int64_t count) {
  f32x16 high = set1(0.0f), low = set1(0.0f), poison = set1(0.0f);
  for (int64_t i = 0; i < count; i += 16) {
    const f32x16 v = load(x + i);
    high = max(v, high), low = max(sub(set1(0.0f), v), low), poison = fma(v, set1(0.0f), poison);
  }
  const float top = largest(high), bottom = largest(low);
  return (top >= bottom ? top : -bottom) + sum(poison);
}

LOWBIT_INLINE void quantize_row(const KvQuantizeArgs& args, int64_t b, int64_t h, int64_t l, float* row, int32_t* q) {
  const int64_t columns = args.x.size(3), padded = kv_padded(columns);
  for (int64_t c = 0; c < padded; c += 16) store(row + c, set1(0.0f));
  widen_rows(HeadView(args.x, b, h), l, 1, columns, 1.0f, Matrix<float>{row, padded});
  if (args.rotate) rotate_row(row, columns);
  if (args.format() == KvFormat::int8) {
    const float scale = store_scale(args.scale, b, h, l, 0, __builtin_fabsf(extreme(row, padded)) / 127.0f);
    quantize_group(row, padded, scale, -127.0f, 127.0f, q);
    for (int64_t c = 0; c < padded; c += 16)
      store_i8(row_of<int8_t>(args.codes, b, h, l) + c, load_i32(reinterpret_cast<float*>(q + c)));
    return;
  }
  for (int64_t g = 0; g < padded / kKvGroup; g++) {  // the extreme becomes -8, the level without an opposite
    const float scale = store_scale(args.scale, b, h, l, g, extreme(row + g * kKvGroup, kKvGroup) / -8.0f);
    quantize_group(row + g * kKvGroup, kKvGroup, scale, -8.0f, 7.0f, q);
    uint8_t* to = row_of<uint8_t>(args.codes, b, h, l) + g * kKvGroup / 2;
    for (int64_t i = 0; i < 16; i++) to[i] = static_cast<uint8_t>((q[i] + 8) | (q[i + 16] + 8) << 4);
  }
}

LOWBIT_INLINE void dequantize_row(const KvDequantizeArgs& args, int64_t b, int64_t h, int64_t l, float* row) {
  const int64_t columns = args.x.size(3);
  const float one = 1.0f;
  const Matrix<float> to{row, kv_padded(columns)};
  widen_rows(HeadView(args.codes, args.scale, args.rotated, b, h), l, 1, columns, one, to);
  narrow_rows(to, &one, 1, columns, HeadView(args.x, b, h), l);
}

void kv_quantize_rows_of(const KvQuantizeArgs& args) {
  const int64_t padded = kv_padded(args.x.size(3));
  for_each_head_row(args.x, [&](int64_t b, int64_t h, int64_t l) {
    const Scratch memory(2 * (padded * static_cast<int64_t>(sizeof(float)) + kRedZone));
    Arena arena = memory.arena();
    float* row = arena.array<float>(padded);
    quantize_row(args, b, h, l, row, arena.array<int32_t>(padded));
  });
}

void kv_dequantize_rows_of(const KvDequantizeArgs& args) {
  const int64_t padded = kv_padded(args.x.size(3));
  for_each_head_row(args.x, [&](int64_t b, int64_t h, int64_t l) {
    const Scratch row(padded * static_cast<int64_t>(sizeof(float)));
    dequantize_row(args, b, h, l, row.as<float>());
  });
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
