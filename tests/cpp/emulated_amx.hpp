// SPDX-License-Identifier: Apache-2.0
// The tile unit of amx in plain C++, one per thread as in the processor, beside the emulated trait of avx512_vnni. With
// LOWBIT_ROWS_TOGETHER=2 the unit of simd/neon_tiles.hpp: both factors lie in memory as its products read them.
#pragma once

#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "../tests/cpp/emulated_vnni.hpp"
#include "cpu/loops.hpp"

#ifndef LOWBIT_ROWS_TOGETHER
#define LOWBIT_ROWS_TOGETHER 1
#endif

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

inline float without_subnormal(float x) {  // as factors, as sums and on the way to bfloat16 they count as zero
  return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x;
}

#if LOWBIT_ROWS_TOGETHER == 2
using TileSum = LOWBIT_TILE_SUM;  // of the unit's one kind of products
#else
using TileSum = void;
#endif

class TileUnit : public TileNumbers {
 public:
  static constexpr int64_t kRowsTogether = LOWBIT_ROWS_TOGETHER;
  static constexpr bool kSumsInRegisters = kRowsTogether == 2;
  static constexpr int64_t kL1 = 48 << 10, kL2 = 2 << 20;

  explicit TileUnit(int64_t bytes) { bytes_ = bytes; }
  ~TileUnit() { bytes_ = 0; }

  template <int tile> static void zero() { std::memset(tiles_[tile], 0, sizeof tiles_[tile]); }
  static void before_loads() {}
  template <int tile> static void load(const void* rows, int64_t stride) {
    if constexpr (kRowsTogether == 2 && tile >= kActivations)
      return load_joined<tile>(static_cast<const char*>(rows), stride);
    const int64_t count = tile / 2 == kWeights / 2 ? bytes_ / 4 : kRows;
    const int64_t bytes = tile / 2 == kActivations / 2 ? bytes_ : 64;
    for (int64_t row = 0; row < count; row++)
      std::memcpy(tiles_[tile] + row * 64, static_cast<const char*>(rows) + row * stride, static_cast<size_t>(bytes));
  }
  template <int tile> static void load_passing(const void* rows, int64_t stride) { load<tile>(rows, stride); }
  template <int tile, class Sum> static void store(Sum (&sums)[kRows * 16]) {
    std::memcpy(sums, tiles_[tile], sizeof sums);
  }
  template <int tile> static void store(float* rows, int64_t stride) {
    for (int64_t row = 0; row < kRows; row++)
      std::memcpy(reinterpret_cast<char*>(rows) + row * stride, tiles_[tile] + row * 64, 64);
  }
  template <class Sum, int sums, int activations, int weights> static void add_products() {
    for (int64_t row = 0; row < kRows; row++)
      for (int64_t column = 0; column < 16; column++) {
        Sum sum = at<Sum>(sums, row * 64 + column * 4);
        if constexpr (std::is_same_v<Sum, float>) sum = without_subnormal(sum);
        for (int64_t byte = 0; byte < bytes_; byte += 4) {
          const int64_t x = row * 64 + byte, w = byte / 4 * 64 + column * 4;
          if constexpr (std::is_same_v<Sum, int32_t>)
            for (int64_t i = 0; i < 4; i++) sum += at<int8_t>(activations, x + i) * at<uint8_t>(weights, w + i);
          else
            for (int64_t i = 0; i < 4; i += 2) sum += bfloat16(activations, x + i) * bfloat16(weights, w + i);
        }
        std::memcpy(tiles_[sums] + row * 64 + column * 4, &sum, 4);
      }
  }
  static void join_rows(const void* first, const void* second, int64_t bytes, void* to) {
    for (int64_t at = 0; at < bytes; at += 8) {
      char both[16];
      std::memcpy(both, static_cast<const char*>(first) + at, 8);
      std::memcpy(both + 8, static_cast<const char*>(second) + at, 8);
      std::memcpy(static_cast<char*>(to) + 2 * at, both, 16);
    }
  }
  static void join_columns(void* tiles, int64_t bytes) {
    for (char *at = static_cast<char*>(tiles), *end = at + bytes; at < end; at += 128) {
      char joined[128];
      for (int64_t part = 0; part < 32; part++) std::memcpy(joined + part % 16 * 8 + part / 16 * 4, at + part * 4, 4);
      std::memcpy(at, joined, 128);
    }
  }
  template <int sums, int kPanels, class Weights>
  static void add_steps(TileRows activations, Weights&& weights, int64_t steps) {
    for (int64_t step = 0; step < steps; step++)
      unroll<kPanels>([&](auto p) {
        load<kActivations>(activations.at(step).rows, activations.stride);
        load<kWeights>(weights(p).at(step).rows, 64);
        add_products<TileSum, sums + p, kActivations, kWeights>();
      });
  }

 private:
  template <int tile> static void load_joined(const char* rows, int64_t stride) {
    const bool weights = tile >= kWeights;
    for (int64_t row = 0; row < (weights ? bytes_ / 4 : kRows); row++)
      for (int64_t byte = 0; byte < (weights ? 64 : bytes_); byte++)
        tiles_[tile][row * 64 + byte] = weights ? rows[row / 2 * 128 + byte / 4 * 8 + row % 2 * 4 + byte % 4]
                                                : rows[row / 2 * 2 * stride + byte / 8 * 16 + row % 2 * 8 + byte % 8];
  }
  template <class T> static T at(int tile, int64_t byte) {
    T value;
    std::memcpy(&value, tiles_[tile] + byte, sizeof value);
    return value;
  }
  static float bfloat16(int tile, int64_t byte) {
    return without_subnormal(float_from_bfloat16(at<uint16_t>(tile, byte)));
  }

  static inline thread_local char tiles_[8][1024];
  static inline thread_local int64_t bytes_ = 0;
};

inline void store_32_bf16(uint16_t* p, f32x16 a, f32x16 b) {
  for (f32x16* x : {&a, &b})
    for (float& lane : x->lane) lane = without_subnormal(lane);
  store_bf16(p, a), store_bf16(p + 16, b);
}
inline i32x16 lookup32_u16(const uint16_t* table, i32x16 index) {
  uint16_t halves[32];
  std::memcpy(halves, &index, sizeof halves);
  for (uint16_t& half : halves) half = table[half % 32];
  std::memcpy(&index, halves, sizeof halves);
  return index;
}
inline i32x16 bf16_pairs(f32x16 a, f32x16 b) {
  uint16_t halves[2][16];
  store_32_bf16(halves[0], a, b);
  int32_t pairs[16];
  for (int i = 0; i < 16; i++) pairs[i] = static_cast<int32_t>(halves[0][i] | uint32_t{halves[1][i]} << 16);
  return load_i32(pairs);
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
