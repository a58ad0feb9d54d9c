// SPDX-License-Identifier: Apache-2.0
// Rows of a head as matrices in the scratch memory of a thread: widened to float32 (or float64), and stored back.
#pragma once

#include "core/tensor_view.hpp"
#include "cpu/tile_products.hpp"
#include "ops/decode.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

struct bfloat16_bits { uint16_t bits; };
struct float16_bits { uint16_t bits; };

LOWBIT_INLINE f32x16 load16(const float* p) { return load(p); }
LOWBIT_INLINE f32x16 load16(const bfloat16_bits* p) { return load_bf16(&p->bits); }
LOWBIT_INLINE f32x16 load16(const float16_bits* p) { return load_f16(&p->bits); }
LOWBIT_INLINE f64x16 load16(const double* p) { return load(p); }
LOWBIT_INLINE void store16(float* p, f32x16 a) { store(p, a); }
LOWBIT_INLINE void store16(bfloat16_bits* p, f32x16 a) { store_bf16(&p->bits, a); }
LOWBIT_INLINE void store16(float16_bits* p, f32x16 a) { store_f16(&p->bits, a); }
LOWBIT_INLINE void store16(double* p, f64x16 a) { store(p, a); }

// Calls f with a null pointer of a tensor's element type, for arithmetic in T.
template <class T, class F>
LOWBIT_INLINE void with_elements(DType dtype, F&& f) {
  if constexpr (sizeof(T) == 8) {
    f(static_cast<const double*>(nullptr));
  } else {
    if (dtype == DType::float32) f(static_cast<const float*>(nullptr));
    else if (dtype == DType::bfloat16) f(static_cast<const bfloat16_bits*>(nullptr));
    else f(static_cast<const float16_bits*>(nullptr));
  }
}

template <class T>
LOWBIT_INLINE void fill(T* to, int64_t count, T x) {
  for (int64_t i = 0; i < count; i++) to[i] = x;
}

// A head of a tensor [B, H, length, columns] with a dense last dimension, or of codes with scales.
struct HeadView {
  const char* data;
  DType dtype;
  int64_t stride;                     // elements from row to row
  const TensorView* scale = nullptr;  // scales of codes
  int64_t first_scale = 0;
  bool rotated = false;
  LOWBIT_INLINE HeadView(const TensorView& tensor, int64_t b, int64_t h)
      : data(tensor.as<const char>() +
             (b * tensor.stride[0] + h * tensor.stride[1]) * static_cast<int64_t>(size_of(tensor.dtype))),
        dtype(tensor.dtype), stride(tensor.stride[2]) {}
  LOWBIT_INLINE HeadView(const TensorView& codes, const TensorView& scales, bool rotated, int64_t b, int64_t h)
      : HeadView(codes, b, h) {
    if (scales)
      scale = &scales, first_scale = b * scales.stride[0] + h * scales.stride[1], this->rotated = rotated;
  }
};

LOWBIT_INLINE float scale_at(const TensorView& scale, int64_t at) {
  return scale.dtype == DType::float16 ? float_from_float16(scale.as<const uint16_t>()[at])
                                       : scale.as<const float>()[at];
}

struct Hadamard16 {
  float sign[16][16];
  constexpr Hadamard16() : sign() {
    for (unsigned i = 0; i < 16; i++)
      for (unsigned j = 0; j < 16; j++) sign[i][j] = __builtin_popcount(i & j) % 2 ? -1.0f : 1.0f;
  }
};
constexpr Hadamard16 kHadamard16;

// Multiplies a row by the normalized Hadamard matrix of kv_rotation(columns), its own inverse. Strides below a vector
// are done as a matrix product: as scalars, they took a third of a prompt over int4 (Sapphire Rapids).
LOWBIT_INLINE void rotate_row(float* row, int64_t columns) {
  const int64_t size = kv_rotation(columns), padded = kv_padded(columns);
  const f32x16 norm = set1(1.0f / __builtin_sqrtf(static_cast<float>(size)));
  for (int64_t c = 0; c < padded; c += 16) {
    f32x16 sum = set1(0.0f);
    for (int j = 0; j < 16; j++) sum = fma(set1(row[c + j]), load(kHadamard16.sign[j]), sum);
    store(row + c, mul(sum, norm));
  }
  for (int64_t half = 16; half < size; half *= 2)
    for (int64_t block = 0; block < padded; block += 2 * half)
      for (int64_t c = block; c < block + half; c += 16) {
        const f32x16 a = load(row + c), b = load(row + c + half);
        store(row + c, add(a, b)), store(row + c + half, sub(a, b));
      }
}

// widen_rows for codes.
inline void widen_codes(const HeadView& head, int64_t first, int64_t rows, int64_t columns, float factor,
                        Matrix<float> to) {
  alignas(64) float row[kMaxKvColumns];
  const int64_t last_scale = head.scale->size(3) - 1;
  for (int64_t r = 0; r < rows; r++) {
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(head.data) + (first + r) * head.stride;
    for (int64_t c = 0; c < columns; c += kKvGroup) {
      const int64_t at = head.first_scale + (first + r) * head.scale->stride[2] + smaller(c / kKvGroup, last_scale);
      const f32x16 scale = set1(scale_at(*head.scale, at) * factor);
      i32x16 low, high;
      if (head.dtype == DType::int8) {
        const i32x16 sign = set1(int32_t{128});
        low = sub(bit_xor(load_u8(codes + c), sign), sign), high = sub(bit_xor(load_u8(codes + c + 16), sign), sign);
      } else {
        const i32x16 both = load_u8(codes + c / 2), zero = set1(int32_t{8});
        low = sub(bit_and(both, set1(int32_t{15})), zero), high = sub(shift_right<4>(both), zero);
      }
      store(row + c, mul(to_float(low), scale)), store(row + c + 16, mul(to_float(high), scale));
    }
    if (head.rotated) rotate_row(row, columns);
    for (int64_t c = columns; c < round_up(columns, 16); c++) row[c] = 0;
    for (int64_t c = 0; c < columns; c += 16) store(to.row(r) + c, load(row + c));
  }
}

// Widens one row of up to 16 * n elements; zeros up to the next multiple of 16.
template <class E, class T>
LOWBIT_INLINE void widen_row(const E* from, int64_t columns, T factor, T* to) {
  const int64_t whole = columns / 16 * 16;
  const auto scale = set1(factor);
  for (int64_t c = 0; c < whole; c += 16) store(to + c, mul(load16(from + c), scale));
  if (whole == columns) return;
  E last[16] = {};
  for (int64_t c = whole; c < columns; c++) last[c - whole] = from[c];
  store(to + whole, mul(load16(last), scale));
}

// to[r][c] = factor * head[first + r][c]; zeros up to the next multiple of 16 columns.
template <class T>
void widen_rows(const HeadView& head, int64_t first, int64_t rows, int64_t columns, T factor, Matrix<T> to) {
  if constexpr (sizeof(T) == 4)
    if (head.scale) return widen_codes(head, first, rows, columns, factor, to);
  with_elements<T>(head.dtype, [&](auto* tag) {
    auto* from = reinterpret_cast<decltype(tag)>(head.data) + first * head.stride;
    for (int64_t r = 0; r < rows; r++) widen_row(from + r * head.stride, columns, factor, to.row(r));
  });
}

// to[c][r] = head[first + r][c]; columns of `to` up to the next multiple of 16 are zero.
template <class T>
void transpose_rows(const HeadView& head, int64_t first, int64_t rows, int64_t columns, Matrix<T> to,
                    Matrix<T> buffer) {
  const bool as_it_is = head.dtype == (sizeof(T) == 8 ? DType::float64 : DType::float32) && columns % 16 == 0;
  for (int64_t r = 0; r < rows; r += 16) {
    const int64_t count = smaller(16, rows - r);
    const T* block = buffer.data;
    int64_t stride = buffer.stride;
    if (as_it_is && count == 16) {
      block = reinterpret_cast<const T*>(head.data) + (first + r) * head.stride, stride = head.stride;
    } else {
      widen_rows(head, first + r, count, columns, T{1}, buffer);
      clear_rows(buffer.from(count), 16 - count);
    }
    for (int64_t c = 0; c < columns; c += 16) transpose_16x16(block + c, stride, to.row(c) + r, to.stride);
  }
}

// Stores rows of a tile: head[first + r][c] = from[r][c] * factor[r].
template <class T>
void narrow_rows(Matrix<T> from, const T* factor, int64_t rows, int64_t columns, const HeadView& head, int64_t first) {
  with_elements<T>(head.dtype, [&](auto* tag) {
    using E = std::remove_cvref_t<decltype(*tag)>;
    for (int64_t r = 0; r < rows; r++) {
      E* to = reinterpret_cast<E*>(const_cast<char*>(head.data)) + (first + r) * head.stride;
      const auto scale = set1(factor[r]);
      const int64_t whole = columns / 16 * 16;
      for (int64_t c = 0; c < whole; c += 16) store16(to + c, mul(load(from.row(r) + c), scale));
      if (whole == columns) continue;
      E last[16];
      store16(last, mul(load(from.row(r) + whole), scale));
      for (int64_t c = whole; c < columns; c++) to[c] = last[c - whole];
    }
  });
}

LOWBIT_INLINE MemoryRows head_rows(const HeadView& head, int64_t first, int64_t count, int64_t columns) {
  const int64_t size = static_cast<int64_t>(size_of(head.dtype));
  return {head.data + first * head.stride * size, count, columns * size, head.stride * size};
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
