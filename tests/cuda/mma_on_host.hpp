// SPDX-License-Identifier: Apache-2.0
// The instructions of cuda/device/mma.cuh on the host, as PTX describes them; sums lose what the tensor cores may: they
// are cut to float32 after each product of 16 k. Included by cuda_on_host.hpp.
#pragma once

namespace on_host {

inline double bf16(uint32_t word, int half) {
  return __builtin_bit_cast(float, word >> 16 * half << 16);
}

inline float toward_zero(double a) {
  const auto nearest = static_cast<float>(a);
  const bool beyond = std::abs(static_cast<double>(nearest)) > std::abs(a) && std::isfinite(nearest);
  return beyond ? std::nextafter(nearest, 0.0f) : nearest;
}

// c[row][column] of this lane: body(row of 16, column of 8, its place in c).
template <class Body>
void for_each_result(Body body) {
  const unsigned g = current % 32 / 4, t = current % 4;
  for (unsigned i = 0; i < 4; i++) body(g + i / 2 * 8, 2 * t + i % 2, i);
}

// sum(a, b) of the words of both factors that share k, for each result.
template <class C, class Sum>
void multiply(C (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Sum sum) {
  const Exchanged words = exchange({a[0], a[1], a[2], a[3], b[0], b[1]});
  for_each_result([&](unsigned row, unsigned column, unsigned i) {
    for (unsigned t = 0; t < 4; t++) {
      const auto &of_row = words.of(row % 8 * 4 + t), &of_column = words.of(column * 4 + t);
      for (unsigned half = 0; half < 2; half++) sum(i, of_row[half * 2 + row / 8], of_column[4 + half]);
    }
  });
}

}  // namespace on_host

namespace lowbit::cuda {

inline void multiply_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  double sums[4] = {c[0], c[1], c[2], c[3]};
  on_host::multiply(c, a, b, [&](unsigned i, uint32_t x, uint32_t y) {
    for (int half = 0; half < 2; half++) sums[i] += on_host::bf16(x, half) * on_host::bf16(y, half);
  });
  for (int i = 0; i < 4; i++) c[i] = on_host::toward_zero(sums[i]);
}

template <class Byte>  // of a; of b they are signed
void multiply_bytes(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  uint32_t sums[4] = {};  // with wrap-around
  on_host::multiply(c, a, b, [&](unsigned i, uint32_t x, uint32_t y) {
    for (int byte = 0; byte < 4; byte++)
      sums[i] += static_cast<uint32_t>(static_cast<Byte>(x >> 8 * byte)) *
                 static_cast<uint32_t>(static_cast<int8_t>(y >> 8 * byte));
  });
  for (int i = 0; i < 4; i++) c[i] = static_cast<int32_t>(static_cast<uint32_t>(c[i]) + sums[i]);
}
inline void multiply_u8s8(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  multiply_bytes<uint8_t>(c, a, b);
}
inline void multiply_s8s8(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  multiply_bytes<int8_t>(c, a, b);
}

inline uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  const auto rounded = [](double exact) {  // of what we use it for nothing is rounded: all 53 bits must do
    const auto single = static_cast<float>(exact);
    const uint32_t bits = __builtin_bit_cast(uint32_t, single);
    if (single == exact && (bits & 0xffff) == 0) return bits >> 16;
    std::fprintf(stderr, "fma_bf16x2 of our sources rounds\n"), std::abort();
  };
  uint32_t d = 0;
  for (int half = 0; half < 2; half++)
    d |= rounded(std::fma(on_host::bf16(a, half), on_host::bf16(b, half), on_host::bf16(c, half))) << 16 * half;
  return d;
}

inline uint32_t load_once(const uint32_t* p) { return *p; }
inline uint2 load_once(const uint2* p) {
  if (reinterpret_cast<uintptr_t>(p) % 8) std::fprintf(stderr, "load of 8 bytes is not aligned\n"), std::abort();
  return *p;
}

}  // namespace lowbit::cuda
