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

// first(half, word), second(column, word): words of 8 along k; of the first factor of rows g and g + 8 of this lane.
// of(word, i): a word as a number of type Wide; kEach of them in a word.
template <class Wide, int kEach, int kCount, class C, class First, class Second, class Of, class Kept>
void multiply_later(C (&c)[kCount][4], bool adds, First first, Second second, Of of, Kept kept) {
  const unsigned t = current % 4;
  auto make = [=, &c] {
    for (unsigned j = 0; j < kCount; j++)
      for (unsigned i = 0; i < 4; i++) {
        Wide sum{};
        for (unsigned word = 0; word < 8; word++) {
          const uint32_t x = first(i / 2, word), y = second(8 * j + 2 * t + i % 2, word);
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

inline const unsigned char* matrices(const void* at) {
  if (reinterpret_cast<uintptr_t>(at) % 16) std::fprintf(stderr, "matrices are not aligned\n"), std::abort();
  return static_cast<const unsigned char*>(at);
}
// A first factor in registers: of the lanes of g, two rows each.
inline auto words_of_registers(const uint32_t (&a)[4]) {
  const auto mine = reinterpret_cast<uint64_t>(&a[0]);
  const Exchanged all = exchange({static_cast<uint32_t>(mine), static_cast<uint32_t>(mine >> 32)});
  std::array<const uint32_t*, 4> rows;
  for (unsigned i = 0; i < 4; i++) rows[i] = registers_of(all, current % 32 / 4 * 4 + i);
  return [rows](unsigned half, unsigned word) { return rows[word % 4][word / 4 * 2 + half]; };
}
// Rows of the second factor are columns of the result: a word lies in one of them.
template <int kRowsStep>
auto words_along_rows(const void* at) {
  return [bytes = matrices(at)](unsigned column, unsigned word) {
    uint32_t y;
    std::memcpy(&y, bytes + column / 8 * kRowsStep + word / 4 * 128 + column % 8 * 16 + word % 4 * 4, 4);
    return y;
  };
}
// Likewise those of a first factor: a warp has 16 of 64.
template <int kRowsStep>
auto words_of_rows(const void* at) {
  return [words = words_along_rows<kRowsStep>(at), first = current / 32 % 4 * 16 + current % 32 / 4](
             unsigned half, unsigned word) { return words(first + 8 * half, word); };
}
// Rows are k: a word has 16 bits each of two of them.
template <int kRowsStep>
auto words_across_rows(const void* at) {
  return [bytes = matrices(at)](unsigned column, unsigned word) {
    uint16_t y[2];
    for (unsigned i = 0; i < 2; i++) {
      const unsigned k = 2 * word + i;
      std::memcpy(&y[i], bytes + k / 8 * kRowsStep + column / 8 * 128 + k % 8 * 16 + column % 8 * 2, 2);
    }
    return uint32_t{y[1]} << 16 | y[0];
  };
}

}  // namespace on_host

namespace lowbit::cuda {

inline void begin_products() {}
inline void show_to_products() {}
template <bool kMore, int kCount>
void set_registers() {}
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

// dtype: a DType
template <auto dtype, int kCount, class First, class Second>
void multiply_16_later(float (&c)[kCount][4], bool adds, First first, Second second) {
  on_host::multiply_later<double, 2>(
      c, adds, first, second,
      [](uint32_t word, int i, bool) {
        return dtype == decltype(dtype)::bfloat16 ? on_host::bf16(word, i)
                                                  : static_cast<double>(float_of_half(word >> 16 * i));
      },
      [](float before, double sum) { return on_host::toward_zero(before + sum); });
}
template <auto dtype, int kRowsStep, int kCount>
void multiply_by_shared(float (&c)[kCount][4], const uint32_t (&a)[4], const void* second, bool adds) {
  const auto first = on_host::words_of_registers(a);
  multiply_16_later<dtype>(c, adds, first, on_host::words_along_rows<kRowsStep>(second));
}
template <auto dtype, int kRowsStep, int kCount>
void multiply_by_rows_of_k(float (&c)[kCount][4], const uint32_t (&a)[4], const void* second, bool adds) {
  const auto first = on_host::words_of_registers(a);
  multiply_16_later<dtype>(c, adds, first, on_host::words_across_rows<kRowsStep>(second));
}
template <auto dtype, int kFirstStep, int kSecondStep, int kCount>
void multiply_shared(float (&c)[kCount][4], const void* first, const void* second, bool adds) {
  multiply_16_later<dtype>(c, adds, on_host::words_of_rows<kFirstStep>(first),
                           on_host::words_along_rows<kSecondStep>(second));
}
template <int kRowsStep, int kCount>
void multiply_by_shared(int32_t (&c)[kCount][4], const uint32_t (&a)[4], const void* second, bool adds) {
  const auto first = on_host::words_of_registers(a);
  on_host::multiply_later<uint32_t, 4>(
      c, adds, first, on_host::words_along_rows<kRowsStep>(second),
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
