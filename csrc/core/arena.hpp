// SPDX-License-Identifier: Apache-2.0
// Red zones: under AddressSanitizer (tools/sanitize) each array in scratch memory is followed by poisoned bytes, so
// that an access past its end is reported instead of reaching the next array unnoticed. In all other builds red zones
// have no bytes and the code below does nothing.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/bits.hpp"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#define LOWBIT_FORBID(at, bytes) ASAN_POISON_MEMORY_REGION(at, static_cast<std::size_t>(bytes))
#define LOWBIT_ALLOW(at, bytes) ASAN_UNPOISON_MEMORY_REGION(at, static_cast<std::size_t>(bytes))
#else
#define LOWBIT_FORBID(at, bytes) (static_cast<void>(at), static_cast<void>(bytes))
#define LOWBIT_ALLOW(at, bytes) (static_cast<void>(at), static_cast<void>(bytes))
#endif

namespace lowbit {
namespace {

#ifdef __SANITIZE_ADDRESS__
constexpr bool kRedZones = true;
#else
constexpr bool kRedZones = false;
#endif
constexpr int64_t kRedZone = kRedZones ? 64 : 0;  // bytes

// Carves 64-byte aligned arrays out of one block of memory, with a red zone after each. With a null base it only counts
// the bytes.
struct Arena {
  char* base = nullptr;
  int64_t bytes = 0;
  template <class T>
  LOWBIT_INLINE T* array(int64_t count) {
    char* const at = base ? base + bytes : nullptr;
    const int64_t used = count * static_cast<int64_t>(sizeof(T)), end = round_up(bytes + used + kRedZone, 64);
    if (kRedZones && base) {
      LOWBIT_ALLOW(at, used);
      LOWBIT_FORBID(at + used, end - bytes - used);
    }
    bytes = end;
    return reinterpret_cast<T*>(at);
  }
};

}  // namespace
}  // namespace lowbit
