// SPDX-License-Identifier: Apache-2.0
// The instructions of cuda/device/tiles.cuh on the host. Copies to shared memory are made at the worst of times: when
// they are waited for, or at once, as a coin falls. Included by cuda_on_host.hpp.
#pragma once

namespace lowbit::cuda {

inline void check_aligned(const void* p, const char* what) {
  if (reinterpret_cast<uintptr_t>(p) % 16) std::fprintf(stderr, "%s is not aligned\n", what), std::abort();
}

// Of lane (g, t) words t of row g of four matrices, whose rows the lanes hand over as they are when the warp comes.
inline void load_matrices(uint32_t (&to)[4], const uint16_t* row) {
  check_aligned(row, "row of a matrix");
  std::array<uint32_t, 6> words{};
  std::memcpy(words.data(), row, 16);
  const on_host::Exchanged rows = on_host::exchange(words);
  const unsigned lane = on_host::current % 32;
  for (unsigned i = 0; i < 4; i++) to[i] = rows.of(i * 8 + lane / 4)[lane % 4];
}
inline void load_transposed(uint32_t (&to)[4], const uint16_t* row, uint32_t bytes = 0) {
  row += bytes / 2;
  check_aligned(row, "row of a matrix");
  std::array<uint32_t, 6> words{};
  std::memcpy(words.data(), row, 16);
  const on_host::Exchanged rows = on_host::exchange(words);
  const unsigned g = on_host::current % 32 / 4, t = on_host::current % 4;
  const auto element = [&](unsigned matrix, unsigned of_row) {
    return rows.of(matrix * 8 + of_row)[g / 2] >> 16 * (g % 2) & 0xffffu;
  };
  for (unsigned i = 0; i < 4; i++) to[i] = element(i, 2 * t) | element(i, 2 * t + 1) << 16;
}

inline void make(const on_host::Fiber::Copy& copy) {
  if (copy.from) std::memcpy(copy.to, copy.from, 16);
  else std::memset(copy.to, 0, 16);
}
inline void copy_async(uint16_t* to, const uint16_t* from, bool is_there) {
  check_aligned(to, "copy to shared memory"), check_aligned(from, "copy from global memory");
  auto& fiber = on_host::fibers[on_host::current];
  const on_host::Fiber::Copy copy{to, is_there ? from : nullptr, fiber.groups};
  if (on_host::coins() & 256) make(copy);
  else fiber.copies.push_back(copy);
}
inline void copy_through_l1(void* to, const void* from) {
  copy_async(static_cast<uint16_t*>(to), static_cast<const uint16_t*>(from), true);
}
inline void make_copies(int groups) {  // of groups before this one
  auto& copies = on_host::fibers[on_host::current].copies;
  for (const auto& copy : copies)
    if (copy.group < groups) make(copy);
  std::erase_if(copies, [groups](const auto& copy) { return copy.group < groups; });
}
inline void commit_copies() { on_host::fibers[on_host::current].groups++; }
inline void wait_for_copies() { make_copies(on_host::fibers[on_host::current].groups + 1); }
template <int kPending>
void wait_for_groups() { make_copies(on_host::fibers[on_host::current].groups - kPending); }

inline void multiply_f16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  double sums[4] = {c[0], c[1], c[2], c[3]};
  on_host::multiply(c, a, b, [&](unsigned i, uint32_t x, uint32_t y) {
    for (int half = 0; half < 2; half++)
      sums[i] += static_cast<double>(float_of_half(x >> 16 * half)) * float_of_half(y >> 16 * half);
  });
  for (int i = 0; i < 4; i++) c[i] = on_host::toward_zero(sums[i]);
}

inline float power_of_2(float a) {
  const float power = std::exp2(a);
  return power < 0x1p-126f ? 0.0f : power;
}
inline float reciprocal(float a) { return std::abs(a) > 0x1p126f ? 0.0f : 1.0f / a; }

}  // namespace lowbit::cuda
