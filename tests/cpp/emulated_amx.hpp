// SPDX-License-Identifier: Apache-2.0
// The tile unit of amx in plain C++, one per thread as in the processor, beside the emulated trait of avx512_vnni.
#pragma once

#include <cstring>

#include "../tests/cpp/emulated_vnni.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

class TileUnit {
 public:
  static constexpr int64_t kRows = 16;
  static constexpr int kActivations = 4, kWeights = 6;

  explicit TileUnit(int64_t k) { k_ = k; }
  ~TileUnit() { k_ = 0; }

  template <int tile> static void zero() { std::memset(tiles_[tile], 0, sizeof tiles_[tile]); }
  static void before_loads() {}
  template <int tile> static void load(const void* rows, int64_t stride) {
    const int64_t count = tile < kWeights ? kRows : k_ / 4, bytes = tile < kWeights ? k_ : 64;
    for (int64_t row = 0; row < count; row++)
      std::memcpy(tiles_[tile] + row * 64, static_cast<const char*>(rows) + row * stride, static_cast<size_t>(bytes));
  }
  template <int tile> static void store(int32_t (&sums)[kRows * 16]) { std::memcpy(sums, tiles_[tile], sizeof sums); }
  template <int sums, int activations, int weights> static void add_products() {
    for (int64_t row = 0; row < kRows; row++)
      for (int64_t column = 0; column < 16; column++) {
        int32_t sum;
        std::memcpy(&sum, tiles_[sums] + row * 64 + column * 4, 4);
        for (int64_t k = 0; k < k_; k++)
          sum += static_cast<int8_t>(tiles_[activations][row * 64 + k]) *
                 static_cast<uint8_t>(tiles_[weights][k / 4 * 64 + column * 4 + k % 4]);
        std::memcpy(tiles_[sums] + row * 64 + column * 4, &sum, 4);
      }
  }

 private:
  static inline thread_local char tiles_[8][1024];
  static inline thread_local int64_t k_ = 0;
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
