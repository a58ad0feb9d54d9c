// SPDX-License-Identifier: Apache-2.0
#include "core/huge_pages.hpp"

#include <cstddef>

#include "core/bits.hpp"
#include "core/os.hpp"

namespace lowbit {

void prefer_huge_pages(void* data, int64_t bytes) {
  constexpr int64_t kHuge = 2 << 20;
  const auto address = reinterpret_cast<int64_t>(data);
  const int64_t begin = round_up(address, kHuge), end = (address + bytes) / kHuge * kHuge;
  if (begin >= end) return;
  os::prefer_huge_pages(static_cast<char*>(data) + (begin - address), static_cast<std::size_t>(end - begin));
}

}  // namespace lowbit
