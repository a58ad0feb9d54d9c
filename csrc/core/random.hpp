// SPDX-License-Identifier: Apache-2.0
// Counter-based random numbers: a pure function of key and counter, so results do not depend on threads,
// tiles or order.
#pragma once

#include <array>
#include <cstdint>

#include "core/dtype.hpp"

namespace lowbit {

// Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3; SC 2011): 128 random bits per counter.
LOWBIT_INLINE constexpr std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter,
                                                           std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; round++) {
    const uint64_t a = uint64_t{0xD2511F53u} * counter[0], b = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key = {key[0] + 0x9E3779B9u, key[1] + 0xBB67AE85u};
  }
  return counter;
}

// 32 random bits for one element (Wellons' lowbias32 finalizer over the Weyl sequence of the key): six vector
// operations, good enough where an element needs one draw, as in stochastic rounding. `key` comes from Philox, one per
// block of elements.
template <class Int>
LOWBIT_INLINE Int random_bits(Int element, int32_t key) {
  Int x = bit_xor(mul(element, like(element, static_cast<int32_t>(0x9E3779B9u))), like(element, key));
  x = mul(bit_xor(x, shift_right<16>(x)), like(x, 0x7feb352d));
  x = mul(bit_xor(x, shift_right<15>(x)), like(x, static_cast<int32_t>(0x846ca68bu)));
  return bit_xor(x, shift_right<16>(x));
}

// Stochastic rounding in an optimizer step: the seed of a tensor (from the call's seed, the step count and the index in
// the list), and the key of one of its blocks.
LOWBIT_INLINE uint64_t tensor_seed(uint64_t seed, double step, int64_t index) {
  const auto random =
      philox4x32({static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), static_cast<uint32_t>(step), 0},
                 {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  return uint64_t{random[0]} << 32 | random[1];
}

LOWBIT_INLINE int32_t block_key(uint64_t seed, int64_t block) {
  return static_cast<int32_t>(philox4x32({static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), 0, 0},
                                         {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)})[0]);
}

}  // namespace lowbit
