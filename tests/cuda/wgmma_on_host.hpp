// SPDX-License-Identifier: Apache-2.0
// The instructions of cuda/device/wgmma.cuh on the host. A product is made at the worst of times: when its warp waits
// for it, from what its registers and shared memory hold then, or at once, as a coin falls.
// Included by cuda_on_host.hpp.
#pragma once

namespace on_host {

// The words of a lane's first factor, in the registers of the lane, where others find them.
inline const uint32_t* registers_of(const Exchanged& all, unsigned lane) {
  const auto& words = all.of(lane);
  return reinterpret_cast<const uint32_t*>(uint64_t{words[1]} << 32 | words[0]);
}

// element(word, i) of a word of either factor as a number of type Wide; kEach of them in a word.
template <class Wide, int kEach, int kRowsStep, int kCount, class C, class Of, class Kept>
void multiply_by_shared(C (&c)[kCount][4], const uint32_t (&a)[4], const void* second, bool adds, Of of, Kept kept) {
  if (reinterpret_cast<uintptr_t>(second) % 16) std::fprintf(stderr, "matrices are not aligned\n"), std::abort();
  const auto at = reinterpret_cast<uint64_t>(&a[0]);
  const Exchanged all = exchange({static_cast<uint32_t>(at), static_cast<uint32_t>(at >> 32)});
  const unsigned g = current % 32 / 4, t = current % 4;
  std::array<const uint32_t*, 4> rows;  // of the lanes of g, two rows each
  for (unsigned i = 0; i < 4; i++) rows[i] = registers_of(all, g * 4 + i);
  auto make = [=, &c] {
    const auto* bytes = static_cast<const unsigned char*>(second);
    for (int j = 0; j < kCount; j++)
      for (unsigned i = 0; i < 4; i++) {
        Wide sum{};
        for (unsigned half = 0; half < 2; half++)
          for (unsigned word = 0; word < 4; word++) {
            uint32_t y;
            std::memcpy(&y, bytes + j * kRowsStep + half * 128 + (2 * t + i % 2) * 16 + word * 4, 4);
            const uint32_t x = rows[word][2 * half + i / 2];
            for (int each = 0; each < kEach; each++) sum += of(x, each, false) * of(y, each, true);
          }
        c[j][i] = kept(adds ? c[j][i] : C{}, sum);
      }
  };
  // The whole warp, or nothing: a lane alone would see registers of others that have gone on.
  const bool now = shuffled(static_cast<uint32_t>(coins() & 256), 0) != 0;
  auto& pending = fibers[current].products;
  pending.push_back({fibers[current].groups_of_products, make});
  if (!now) return;
  for (const auto& product : pending) product.make();  // in their order
  pending.clear();
  exchange({});
}

}  // namespace on_host

namespace lowbit::cuda {

inline void begin_products() {}
inline void commit_products() { on_host::fibers[on_host::current].groups_of_products++; }
template <int kPending>
void wait_for_products() {
  on_host::exchange({});
  auto& fiber = on_host::fibers[on_host::current];
  const auto is_due = [&](const auto& product) { return product.group < fiber.groups_of_products - kPending; };
  for (const auto& product : fiber.products)
    if (is_due(product)) product.make();
  std::erase_if(fiber.products, is_due);
  on_host::exchange({});
}
template <class Sum, int kCount>
void hold(Sum (&)[kCount][4]) {}

template <auto dtype, int kRowsStep, int kCount>  // dtype: a DType
void multiply_by_shared(float (&c)[kCount][4], const uint32_t (&a)[4], const void* second, bool adds) {
  on_host::multiply_by_shared<double, 2, kRowsStep>(
      c, a, second, adds,
      [](uint32_t word, int i, bool) {
        return dtype == decltype(dtype)::bfloat16 ? on_host::bf16(word, i)
                                                  : static_cast<double>(float_of_half(word >> 16 * i));
      },
      [](float before, double sum) { return on_host::toward_zero(before + sum); });
}
template <int kRowsStep, int kCount>
void multiply_by_shared(int32_t (&c)[kCount][4], const uint32_t (&a)[4], const void* second, bool adds) {
  on_host::multiply_by_shared<uint32_t, 4, kRowsStep>(
      c, a, second, adds,
      [](uint32_t word, int i, bool is_signed) {
        return is_signed ? static_cast<uint32_t>(static_cast<int8_t>(word >> 8 * i)) : word >> 8 * i & 0xff;
      },
      [](int32_t before, uint32_t sum) { return static_cast<int32_t>(static_cast<uint32_t>(before) + sum); });
}

inline uint32_t computed(uint32_t a) { return a; }
inline uint32_t scale_f16x2(uint32_t a, uint32_t less, uint32_t scale) {
  float scaled[2];
  for (int i = 0; i < 2; i++)
    scaled[i] = (float_of_half(a >> 16 * i) - float_of_half(less >> 16 * i)) * float_of_half(scale >> 16 * i);
  return pair_of_f16(scaled[0], scaled[1]);
}
inline uint32_t scale_bf16x2(uint32_t a, uint32_t high, uint32_t low) {
  const auto rounded = [](double exact) {
    const auto single = static_cast<float>(exact);
    return on_host::bf16(pair_of_bf16(single, single), 0);
  };
  float scaled[2];
  for (int i = 0; i < 2; i++) {
    const double rest = rounded(on_host::bf16(a, i) * on_host::bf16(low, i));
    scaled[i] = static_cast<float>(std::fma(on_host::bf16(a, i), on_host::bf16(high, i), rest));
  }
  return pair_of_bf16(scaled[0], scaled[1]);
}

}  // namespace lowbit::cuda
