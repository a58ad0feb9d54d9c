// SPDX-License-Identifier: Apache-2.0
// Checks of the tile unit (class TileUnit of amx, avx512_bf16 and Arm's sets, and the emulated one) and of the
// functions that make pairs of bfloat16 for it.
#pragma once

#include "sixteen_bits.hpp"

namespace {

using Numbers = std::vector<float>;
constexpr int64_t kTileRows = TileUnit::kRows, kColumns = 16;
constexpr int64_t kStride = 160;  // bytes from row to row: more than a row has

uint16_t bfloat16_of(float x) { return kBFloat16.written(x); }

// A tile of activations [16][k] and one of weights, k in pairs: [k / 2][16][2]; as numbers and as they lie in memory.
struct Tiles {
  int64_t k;
  Numbers x, w;
  std::vector<uint16_t> x_memory, w_memory;

  template <class Value>
  Tiles(int64_t k, Value&& value)
      : k(k), x(kTileRows * k), w(k * kColumns), x_memory(kTileRows * kStride / 2), w_memory(k * 16) {
    for (int64_t row = 0; row < kTileRows; row++)
      for (int64_t i = 0; i < k; i++) {
        x_memory[row * kStride / 2 + i] = bfloat16_of(value());
        x[row * k + i] = kBFloat16.read(x_memory[row * kStride / 2 + i]);
      }
    for (int64_t i = 0; i < k; i++)
      for (int64_t column = 0; column < kColumns; column++) {
        uint16_t& code = w_memory[i / 2 * 32 + column * 2 + i % 2] = bfloat16_of(value());
        w[i * kColumns + column] = kBFloat16.read(code);
      }
  }
};

// Whether products of a unit are added to sums of this type.
template <class Unit, class Sum>
concept Adds = requires(Sum (&sums)[kTileRows * 16]) { Unit::template store<0>(sums); };

// Factors as a unit reads them, in place: rows kStride apart, and whole tiles of weights.
template <class Unit>
void join(void* x, int64_t bytes, void* w, int64_t w_bytes) {
  if constexpr (Unit::kRowsTogether == 2) {
    for (int64_t row = 0; row < kTileRows; row += 2) {
      char* const first = static_cast<char*>(x) + row * kStride;
      const std::vector<char> copy(first, first + bytes);
      Unit::join_rows(copy.data(), first + kStride, bytes, first);
    }
    Unit::join_columns(w, w_bytes);
  }
}

float flushed(float x) { return std::fabs(x) < 0x1p-126f ? 0 : x; }

// before + products, or what differs from it by more than sums in float32 may.
void expect_sums(const char* text, const Tiles& tiles, const Numbers& before, const float* got) {
  for (int64_t row = 0; row < kTileRows; row++)
    for (int64_t column = 0; column < kColumns; column++) {
      double wanted = static_cast<double>(flushed(before[row * kColumns + column])), magnitude = std::fabs(wanted);
      for (int64_t i = 0; i < tiles.k; i++) {
        const double term = static_cast<double>(flushed(tiles.x[row * tiles.k + i])) *
                            static_cast<double>(flushed(tiles.w[i * kColumns + column]));
        wanted += term, magnitude += std::fabs(term);
      }
      const double y = static_cast<double>(got[row * kColumns + column]);
      const double budget = 0x1p-23 * static_cast<double>(tiles.k + 1) * magnitude;
      if ((wanted != wanted && y != y) || y == wanted || std::fabs(y - wanted) <= budget) continue;
      if (report.fails(text))
        std::printf("row %d column %d is %a, not %a\n", static_cast<int>(row), static_cast<int>(column), y, wanted);
      return;
    }
}

constexpr int kX = TileUnit::kActivations, kW = TileUnit::kWeights;

// One product onto sums that were loaded, one onto zeros, at tiles 1 and 2, stored in both ways.
template <class Unit>
void multiply(int64_t bytes, Tiles tiles) {
  join<Unit>(tiles.x_memory.data(), bytes, tiles.w_memory.data(), bytes * kColumns);
  Unit unit(bytes);
  Random random(17);
  Numbers before(kTileRows * kColumns);
  for (float& x : before) x = std::normal_distribution<float>()(random);
  before[3] = 0x1p-130f;  // counts as zero
  const Numbers zeros(before.size());
  alignas(64) float sums[kTileRows * 16], strided[kTileRows][24];
  std::memset(strided, 0x5a, sizeof strided);
  Unit::before_loads();
  Unit::template load<1>(before.data(), 64), Unit::template zero<2>();
  Unit::template load<kX>(tiles.x_memory.data(), kStride), Unit::template load<kW>(tiles.w_memory.data(), 64);
  Unit::template add_products<float, 1, kX, kW>(), Unit::template add_products<float, 2, kX, kW>();
  Unit::template store<1>(sums);
  expect_sums("TileUnit::load", tiles, before, sums);
  expect_sums("TileUnit::add_products", tiles, before, sums);
  Unit::template store<2>(sums);
  expect_sums("TileUnit::zero", tiles, zeros, sums);
  Unit::template store<2>(&strided[0][0], sizeof strided[0]);
  bool rows_alone = true;
  for (int64_t row = 0; row < kTileRows; row++) {
    rows_alone = rows_alone && std::memcmp(strided[row], sums + row * 16, 64) == 0;
    for (int i = 16; i < 24; i++) rows_alone = rows_alone && std::bit_cast<uint32_t>(strided[row][i]) == 0x5a5a5a5a;
  }
  if (!rows_alone && report.fails("TileUnit::store"))
    std::printf("rows with a stride are not those of the tile, or more is written\n");
}

// int8 activations times codes, which are unsigned but on Arm, onto zeros: exact.
template <class Unit>
void multiply_codes(int64_t bytes) {
  using Code = std::conditional_t<Unit::kRowsTogether == 2, int8_t, uint8_t>;
  Random random(19);
  std::vector<int8_t> x(kTileRows * kStride);
  std::vector<Code> w(bytes * kColumns);
  for (int corner = 0; corner < 4; corner++) {
    for (int8_t& a : x) a = static_cast<int8_t>(corner == 0 ? -128 : corner == 1 ? 127 : random());
    for (Code& code : w) code = static_cast<Code>(corner < 2 ? 128 : random());
    std::vector<int32_t> wanted(kTileRows * 16);
    for (int64_t row = 0; row < kTileRows; row++)
      for (int64_t column = 0; column < 16; column++)
        for (int64_t i = 0; i < bytes; i++)
          wanted[row * 16 + column] += x[row * kStride + i] * w[i / 4 * 64 + column * 4 + i % 4];
    join<Unit>(x.data(), bytes, w.data(), bytes * kColumns);
    Unit unit(bytes);
    Unit::template zero<0>();
    Unit::before_loads();
    Unit::template load<kX>(x.data(), kStride), Unit::template load<kW>(w.data(), 64);
    Unit::template add_products<int32_t, 0, kX, kW>();
    alignas(64) int32_t sums[kTileRows * 16];
    const auto expect_codes = [&](const char* text) {
      expect(text, wanted, std::vector<int32_t>(sums, sums + kTileRows * 16));
    };
    Unit::template store<0>(sums), expect_codes("TileUnit::add_products");
    Unit::template zero<1>(), Unit::template zero<2>();
    if constexpr (Unit::kSumsInRegisters) {
      const TileRows weights{w.data(), 64, 0};
      Unit::template add_steps<1, 2>(TileRows{x.data(), kStride, 0}, [&](int) { return weights; }, 1);
      Unit::template store<1>(sums), expect_codes("TileUnit::add_steps");
      Unit::template load<3>(sums, 64);
      Unit::template add_steps<3, 1>(TileRows{x.data(), kStride, 0}, [&](int) { return weights; }, 3);
      Unit::template store<3>(sums);
      for (int32_t& sum : wanted) sum *= 4;
      expect_codes("TileUnit::add_steps");
      int32_t strided[kTileRows][24];
      Unit::template store<3>(&strided[0][0], sizeof strided[0]);
      for (int64_t row = 0; row < kTileRows; row++) std::memcpy(sums + row * 16, strided[row], 64);
      expect_codes("TileUnit::store");
    } else {
      Unit::template load_passing<kX>(x.data(), kStride);
      Unit::template add_products<int32_t, 1, kX, kW>();
      Unit::template store<1>(sums), expect_codes("TileUnit::load_passing");
    }
  }
}

// Steps of two tiles, one behind the other, onto sums that stay in registers. Of units that have registers for them.
template <class Unit>
void multiply_steps() {
  Random random(23);
  std::normal_distribution<float> normal;
  Tiles tiles(64, [&] { return normal(random); });
  std::vector<uint16_t> x(2 * kTileRows * 32);  // the first 32 k of all rows, then the others
  for (int64_t row = 0; row < kTileRows; row++)
    for (int64_t i = 0; i < 64; i++)
      x[i / 32 * kTileRows * 32 + row * 32 + i % 32] = bfloat16_of(tiles.x[row * 64 + i]);
  if constexpr (Unit::kRowsTogether == 2) {
    for (uint16_t* row = x.data(); row < x.data() + x.size(); row += 64) {
      const std::vector<uint16_t> first(row, row + 32);
      Unit::join_rows(first.data(), row + 32, 64, row);
    }
    Unit::join_columns(tiles.w_memory.data(), 2048);
  }
  Unit unit(64);
  alignas(64) float sums[kTileRows * 16];
  Unit::template zero<2>(), Unit::template zero<3>();
  Unit::template add_steps<2, 2>(TileRows{x.data(), 64, kTileRows * 64},
                                 [&](int) { return TileRows{tiles.w_memory.data(), 64, 1024}; }, 2);
  for (const bool second : {false, true}) {
    second ? Unit::template store<3>(sums) : Unit::template store<2>(sums);
    expect_sums("TileUnit::add_steps", tiles, Numbers(kTileRows * kColumns), sums);
  }
  if constexpr (requires { Unit::kGroupsInRegisters; }) {
    report.checks("TileUnit::add_groups");
    alignas(64) float first[kTileRows * 16] = {}, second[kTileRows * 16] = {};
    float* const results[] = {first, second};
    Unit::template add_groups<2>(
        results, TileRows{x.data(), 64, kTileRows * 64}, [&](int) { return TileRows{tiles.w_memory.data(), 64, 1024}; },
        2, 1, [](f32x16 total, int64_t, int, int64_t, f32x16 result) { return add(total, result); });
    expect_sums("TileUnit::add_groups", tiles, Numbers(kTileRows * kColumns), first);
    expect_sums("TileUnit::add_groups", tiles, Numbers(kTileRows * kColumns), second);
  }
}

template <class Unit>
void check_tile_unit() {
  for (const char* name : {"zero", "before_loads", "load", "store", "add_products"}) {
    static char text[5][32];
    static int count = 0;
    std::snprintf(text[count], sizeof text[count], "TileUnit::%s", name), report.checks(text[count++]);
  }
  report.checks(Unit::kSumsInRegisters ? "TileUnit::add_steps" : "TileUnit::load_passing");
  if constexpr (Unit::kRowsTogether == 2) report.checks("TileUnit::join_rows"), report.checks("TileUnit::join_columns");
  Random random(29);
  for (const int64_t bytes : {32, 64}) {
    if constexpr (Adds<Unit, float>) {
      const int64_t k = bytes / 2;
      const auto check = [&](auto value) { multiply<Unit>(bytes, Tiles(k, value)); };
      check([&] { return static_cast<float>(random() % 255) - 127; });  // exact sums
      check([&] { return std::normal_distribution<float>()(random); });
      for (const bool weights : {false, true})  // subnormal factors count as zero, of either side
        check([&, n = 0]() mutable { return (n++ < kTileRows * k) == weights ? 0x1p127f : 0x1p-130f; });
      check([&] { return random() % 97 ? 1.0f : INFINITY; });
      check([&] { return random() % 97 ? 1.0f : NAN; });
    }
    if constexpr (Adds<Unit, int32_t>) multiply_codes<Unit>(bytes);
  }
  if constexpr (Unit::kSumsInRegisters && Adds<Unit, float>) multiply_steps<Unit>();
}

#ifdef LOWBIT_HAS_BF16_PAIRS
void check_pairs_of_bfloat16() {
  stores_sixteen_bits(FUNCTION(store_32_bf16, void(uint16_t*, f32x16, f32x16)), kBFloat16, true);
  using OfTwo = Function<void(uint16_t*, f32x16, f32x16)>;
  const auto halves = [](uint16_t* p, f32x16 a, f32x16 b) {
    const auto pairs = std::bit_cast<std::array<uint32_t, 16>>(bf16_pairs(a, b));
    for (int i = 0; i < 32; i++) p[i] = static_cast<uint16_t>(pairs[i % 16] >> i / 16 * 16);
  };
  stores_sixteen_bits(OfTwo{"bf16_pairs i32x16(f32x16, f32x16)", halves}, kBFloat16, true);
}
#endif

#ifdef LOWBIT_HAS_LOOKUP32_U16
void check_lookup_of_halves() {
  alignas(64) static const auto table = made<uint16_t, 32>([](int i) { return 1000 + 37 * i; });
  whole(Function<i32x16(i32x16)>{"lookup32_u16 i32x16(const uint16_t*, i32x16)",
                                 [](i32x16 i) { return lookup32_u16(table.data(), i); }},
        [](const auto& index) {
          return made<int32_t, 16>([&](int i) {
            const uint32_t bits = static_cast<uint32_t>(index[i]);
            return static_cast<int32_t>(table[bits & 31] | uint32_t{table[bits >> 16 & 31]} << 16);
          });
        });
}

#endif

void check_tiles() {
  check_tile_unit<TileUnit>();
#ifdef LOWBIT_HAS_BF16_PAIRS
  check_pairs_of_bfloat16();
#endif
#ifdef LOWBIT_HAS_LOOKUP32_U16
  check_lookup_of_halves();
#endif
}

}  // namespace
