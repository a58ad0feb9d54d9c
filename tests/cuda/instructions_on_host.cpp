// SPDX-License-Identifier: Apache-2.0
// Instructions on the host; what each promises stands in its header.
#include <algorithm>

#include "fibers_on_host.hpp"

namespace lowbit::gpu {

// Without the compiler's conversion, which is a call of its library: products of warpgroups spent a tenth of their time in it.
float float_of_half(uint32_t bits) {
  const uint32_t sign = (bits & 0x8000) << 16, rest = bits & 0x7fff;
  const float small = static_cast<float>(rest) * 0x1p-24f;  // of numbers below the smallest normal one
  const uint32_t moved = (rest << 13) + ((rest < 0x7c00 ? 127 - 15 : 255 - 31) << 23);  // inf and nan keep the largest exponent
  return __builtin_bit_cast(float, sign | (rest < 0x400 ? __builtin_bit_cast(uint32_t, small) : moved));
}

uint32_t pair_of_bf16(float low, float high) {
  const auto rounded = [](float a) {
    const auto bits = __builtin_bit_cast(uint32_t, a);
    return a != a ? 0x7fffu : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  };
  return rounded(low) | rounded(high) << 16;
}
uint32_t pair_of_f16(float low, float high) {
  const auto rounded = [](float a) -> uint32_t {
    const auto half = static_cast<_Float16>(a);
    return a != a ? 0x7fffu : __builtin_bit_cast(uint16_t, half);
  };
  return rounded(low) | rounded(high) << 16;
}

}  // namespace lowbit::gpu

namespace on_host {
namespace {

double bf16(uint32_t word, int half) {
  return __builtin_bit_cast(float, word >> 16 * half << 16);
}

float toward_zero(double a) {
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

void check_aligned(const void* p, const char* what, unsigned bytes = 16) {
  if (reinterpret_cast<uintptr_t>(p) % bytes) std::fprintf(stderr, "%s is not aligned\n", what), std::abort();
}

void check_has_waited() {
  if (!fibers[current].has_waited) end_launch("a copy before the kernels before are waited for");
}

void make(const Fiber::Copy& copy) {
  if (copy.from) std::memcpy(copy.to, copy.from, copy.bytes);
  else std::memset(copy.to, 0, copy.bytes);
}

struct BarrierState {  // as it lies in shared memory
  int16_t arrivals, missing;
  int32_t bytes : 31;
  uint32_t phase : 1;
};
static_assert(sizeof(BarrierState) == 8);

BarrierState& state_of(const void* barrier) {
  auto& state = *static_cast<BarrierState*>(const_cast<void*>(barrier));
  if (state.arrivals <= 0) end_launch("a barrier that is not set up");  // its memory was poisoned
  return state;
}
void end_phase_if_over(BarrierState& barrier) {
  if (barrier.missing == 0 && barrier.bytes == 0) barrier.missing = barrier.arrivals, barrier.phase ^= 1;
}

// The words of a lane's first factor, in the registers of the lane, where others find them.
const uint32_t* registers_of(const Exchanged& all, unsigned lane) {
  const auto& words = all.of(lane);
  return reinterpret_cast<const uint32_t*>(uint64_t{words[1]} << 32 | words[0]);
}

// The place of two bytes of a row, of 16-bit floats; hardware permutes pieces of 16 bytes by bits of the address.
const unsigned char* place_of(const unsigned char* matrices, const Steps& steps, int row, int column) {
  const int width = steps.lines ? 64 : 8;  // columns that lie together
  const auto address = reinterpret_cast<uintptr_t>(matrices) + static_cast<uintptr_t>(
      row / 8 * steps.rows + column / width * steps.columns + row % 8 * width * 2 + column % width * 2);
  if (!steps.lines) return reinterpret_cast<const unsigned char*>(address);
  return reinterpret_cast<const unsigned char*>(address ^ (address >> 7 & 7) << 4);
}
// The 8 words along k of a row of a matrix: two pieces of 16 bytes.
using Words8 = std::array<uint32_t, 8>;
Words8 words_of_row(const unsigned char* matrices, const Steps& steps, int row) {
  Words8 words;
  for (int piece = 0; piece < 2; piece++) std::memcpy(&words[4 * piece], place_of(matrices, steps, row, 8 * piece), 16);
  return words;
}
// Those of two columns that lie side by side, where a row is a k.
std::array<Words8, 2> words_of_columns(const unsigned char* matrices, const Steps& steps, int column) {
  std::array<Words8, 2> words{};
  for (int k = 0; k < 16; k++) {
    uint32_t both;
    std::memcpy(&both, place_of(matrices, steps, k, column), 4);
    for (int i = 0; i < 2; i++) words[i][k / 2] |= (both >> 16 * i & 0xffff) << 16 * (k % 2);
  }
  return words;
}

// of(word, i): a word of a factor as a number of type Wide; kEach of them in a word.
template <class Wide, int kEach, class C, class Of, class Kept>
void multiply_words(C (*c)[4], int count, const FirstFactor& first, bool rows_are_k, Steps steps, const void* second,
                    bool adds, Of of, Kept kept) {
  if ((reinterpret_cast<uintptr_t>(second) | reinterpret_cast<uintptr_t>(first.rows)) % 16)
    std::fprintf(stderr, "matrices are not aligned\n"), std::abort();
  const auto mine = reinterpret_cast<uint64_t>(first.registers);
  const Exchanged all = exchange({static_cast<uint32_t>(mine), static_cast<uint32_t>(mine >> 32)});
  const unsigned g = current % 32 / 4, t = current % 4, row = current / 32 % 4 * 16 + g;
  std::array<const uint32_t*, 4> rows;  // of the lanes of g, two rows each
  for (unsigned i = 0; i < 4; i++) rows[i] = registers_of(all, g * 4 + i);
  auto make = [=] {
    const auto numbers_of = [&](const Words8& words, bool is_second) {
      std::array<Wide, 8 * kEach> numbers;
      for (int i = 0; i < 8 * kEach; i++) numbers[i] = of(words[i / kEach], i % kEach, is_second);
      return numbers;
    };
    std::array<Wide, 8 * kEach> x[2];
    for (int half = 0; half < 2; half++) {
      Words8 words;
      for (int word = 0; word < 8; word++) words[word] = first.registers ? rows[word % 4][word / 4 * 2 + half] : 0;
      if (!first.registers)
        words = words_of_row(static_cast<const unsigned char*>(first.rows), steps, static_cast<int>(row) + half * 8);
      x[half] = numbers_of(words, false);
    }
    for (int j = 0; j < count; j++) {
      const auto* matrices = static_cast<const unsigned char*>(second);
      const int column = 8 * j + 2 * static_cast<int>(t);
      const std::array<Words8, 2> words =
          rows_are_k ? words_of_columns(matrices, steps, column)
                     : std::array{words_of_row(matrices, steps, column), words_of_row(matrices, steps, column + 1)};
      for (int i = 0; i < 4; i++) {
        const auto y = numbers_of(words[i % 2], true);
        Wide sum{};
        for (int k = 0; k < 8 * kEach; k++) sum += x[i / 2][k] * y[k];
        c[j][i] = kept(adds ? c[j][i] : C{}, sum);
      }
    }
  };
  // The whole warp, or nothing: a lane alone would see registers of others that have gone on. That is
  // one time in 16, since it makes those before it too: else a wait that is missing would seldom be seen.
  const bool now = shuffled(static_cast<uint32_t>(coins() & 0xf00), 0) == 0;
  auto& pending = fibers[current].products;
  pending.push_back({fibers[current].groups_of_products, make});
  if (!now) return;
  for (const auto& product : pending) product.make();  // in their order
  pending.clear();
  exchange({});
}

}  // namespace

void multiply_by_shared(Words words, void* c, int count, const FirstFactor& first, bool rows_are_k, Steps steps,
                        const void* second, bool adds) {
  const auto of_floats = [&](auto of) {
    multiply_words<double, 2>(static_cast<float(*)[4]>(c), count, first, rows_are_k, steps, second, adds, of,
                              [](float before, double sum) { return toward_zero(before + sum); });
  };
  switch (words) {
    case Words::bf16: return of_floats([](uint32_t word, int i, bool) { return bf16(word, i); });
    case Words::f16:
      return of_floats([](uint32_t word, int i, bool) {
        return static_cast<double>(lowbit::gpu::float_of_half(word >> 16 * i));
      });
    case Words::bytes:
      multiply_words<uint32_t, 4>(
          static_cast<int32_t(*)[4]>(c), count, first, rows_are_k, steps, second, adds,
          [](uint32_t word, int i, bool is_signed) {
            return is_signed ? static_cast<uint32_t>(static_cast<int8_t>(word >> 8 * i)) : word >> 8 * i & 0xff;
          },
          [](int32_t before, uint32_t sum) { return static_cast<int32_t>(static_cast<uint32_t>(before) + sum); });
  }
}

}  // namespace on_host

namespace lowbit::cuda {

void multiply_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
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
void multiply_u8s8(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  multiply_bytes<uint8_t>(c, a, b);
}
void multiply_s8s8(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  multiply_bytes<int8_t>(c, a, b);
}

uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
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

// Of lane (g, t) words t of row g of four matrices, whose rows the lanes hand over as they are when the warp comes.
void load_matrices(uint32_t (&to)[4], const uint16_t* row) {
  on_host::check_aligned(row, "row of a matrix");
  std::array<uint32_t, 6> words{};
  std::memcpy(words.data(), row, 16);
  const on_host::Exchanged rows = on_host::exchange(words);
  const unsigned lane = on_host::current % 32;
  for (unsigned i = 0; i < 4; i++) to[i] = rows.of(i * 8 + lane / 4)[lane % 4];
}
void load_transposed(uint32_t (&to)[4], const uint16_t* row, uint32_t bytes) {
  row += bytes / 2;
  on_host::check_aligned(row, "row of a matrix");
  std::array<uint32_t, 6> words{};
  std::memcpy(words.data(), row, 16);
  const on_host::Exchanged rows = on_host::exchange(words);
  const unsigned g = on_host::current % 32 / 4, t = on_host::current % 4;
  const auto element = [&](unsigned matrix, unsigned of_row) {
    return rows.of(matrix * 8 + of_row)[g / 2] >> 16 * (g % 2) & 0xffffu;
  };
  for (unsigned i = 0; i < 4; i++) to[i] = element(i, 2 * t) | element(i, 2 * t + 1) << 16;
}

void wait_for_kernels_before() { on_host::fibers[on_host::current].has_waited = true; }
void prefetch_to_l2(const void* from, int bytes) {
  on_host::check_aligned(from, "prefetch from global memory");
  if (bytes <= 0 || bytes % 16) on_host::end_launch("a prefetch of no multiple of 16 bytes");
  static volatile unsigned char read;
  read = *static_cast<const unsigned char*>(from), read = static_cast<const unsigned char*>(from)[bytes - 1];
}

void copy_async(uint16_t* to, const uint16_t* from, bool is_there) {
  on_host::check_aligned(from, "copy from global memory");
  copy_later(to, is_there ? from : nullptr, 16);
}
void copy_later(void* to, const void* from, unsigned bytes) {
  on_host::check_aligned(to, "copy to shared memory", bytes);
  on_host::check_aligned(from, "copy from global memory", bytes);
  auto& fiber = on_host::fibers[on_host::current];
  on_host::check_has_waited();
  const on_host::Fiber::Copy copy{to, from, bytes, fiber.groups};
  if (on_host::coins() & 256) on_host::make(copy);
  else fiber.copies.push_back(copy);
}
void make_copies(int pending) {
  auto& copies = on_host::fibers[on_host::current].copies;
  const int groups = on_host::fibers[on_host::current].groups - pending;
  for (const auto& copy : copies)
    if (copy.group < groups) on_host::make(copy);
  std::erase_if(copies, [groups](const auto& copy) { return copy.group < groups; });
}
void commit_copies() { on_host::fibers[on_host::current].groups++; }

void multiply_f16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  double sums[4] = {c[0], c[1], c[2], c[3]};
  on_host::multiply(c, a, b, [&](unsigned i, uint32_t x, uint32_t y) {
    for (int half = 0; half < 2; half++)
      sums[i] += static_cast<double>(float_of_half(x >> 16 * half)) * float_of_half(y >> 16 * half);
  });
  for (int i = 0; i < 4; i++) c[i] = on_host::toward_zero(sums[i]);
}

void set_up(Barrier& barrier, int arrivals) {
  const auto count = static_cast<int16_t>(arrivals);
  reinterpret_cast<on_host::BarrierState&>(barrier) = {count, count, 0, 0};
}
void arrive(Barrier& barrier) {
  auto& state = on_host::state_of(&barrier);
  if (state.missing-- <= 0) on_host::end_launch("more threads arrive than a barrier counts");
  on_host::end_phase_if_over(state);
}
void arrive_expecting(Barrier& barrier, int bytes) {
  on_host::state_of(&barrier).bytes += bytes;
  arrive(barrier);
}
void arrive_with_copies(Barrier& barrier) {
  auto& copies = on_host::fibers[on_host::current].copies;
  on_host::bulk_copies.push_back([copies, &barrier] {
    for (const auto& copy : copies) on_host::make(copy);
    arrive(barrier);
  });
  copies.clear();
}
void copy_bulk(void* to, const void* from, int bytes, Barrier& barrier) {
  on_host::check_has_waited();
  on_host::check_aligned(to, "copy to shared memory"), on_host::check_aligned(from, "copy from global memory");
  if (bytes % 16) std::fprintf(stderr, "a copy of %d bytes\n", bytes), std::abort();
  on_host::bulk_copies.push_back([=, state = &on_host::state_of(&barrier)] {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
    state->bytes -= bytes;
    on_host::end_phase_if_over(*state);
  });
}
void wait_for(const Barrier& barrier, int phase) {
  for (int tries = 0; static_cast<int>(on_host::state_of(&barrier).phase) == phase; tries++) {
    auto& copies = on_host::bulk_copies;
    if (!copies.empty() && on_host::coins() & 256) {
      const std::size_t i = on_host::coins() / 256 % copies.size();
      copies[i]();
      copies.erase(copies.begin() + static_cast<std::ptrdiff_t>(i));
    } else if (tries == 100000) {
      on_host::end_launch("a thread waits for a barrier for ever");
    } else {
      on_host::wait(on_host::State::runs);
    }
  }
}

void commit_products() { on_host::fibers[on_host::current].groups_of_products++; }
void make_products(int pending) {
  on_host::exchange({});
  auto& fiber = on_host::fibers[on_host::current];
  const auto is_due = [&](const auto& product) { return product.group < fiber.groups_of_products - pending; };
  for (const auto& product : fiber.products)
    if (is_due(product)) product.make();
  std::erase_if(fiber.products, is_due);
  on_host::exchange({});
}

uint32_t scale_f16x2(uint32_t a, uint32_t less, uint32_t scale) {
  float scaled[2];
  for (int i = 0; i < 2; i++)
    scaled[i] = (float_of_half(a >> 16 * i) - float_of_half(less >> 16 * i)) * float_of_half(scale >> 16 * i);
  return pair_of_f16(scaled[0], scaled[1]);
}
uint32_t scale_bf16x2(uint32_t a, uint32_t high, uint32_t low) {
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
