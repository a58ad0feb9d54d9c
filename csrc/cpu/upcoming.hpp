// SPDX-License-Identifier: Apache-2.0
// Prefetches the memory that a kernel reads next while it works.
#pragma once

#include "core/bits.hpp"

namespace lowbit::cpu {

// Rows of memory: `bytes` bytes each, `stride` bytes apart.
struct MemoryRows {
  const char* at = nullptr;
  int64_t count = 0, bytes = 0, stride = 0;
};

}  // namespace lowbit::cpu

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// Rows of memory that are needed next: products prefetch them into L2, `each` rows per tile. Without that, packing keys
// and values spent two thirds of its time, 3 % of the forward at E = 64, waiting for L3, and a bias [H, L, S] took
// twice as long (AVX2, Zen 5).
struct Upcoming {
  MemoryRows rows{};
  int64_t each = 0;
  LOWBIT_INLINE void fetch() {
    for (int64_t left = each; left > 0 && rows.count > 0; left--, rows.count--, rows.at += rows.stride)
      for (int64_t i = 0; i < rows.bytes; i += 64) __builtin_prefetch(rows.at + i, 0, 2);
  }
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
