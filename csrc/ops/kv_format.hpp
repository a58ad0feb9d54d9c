// SPDX-License-Identifier: Apache-2.0
// Sizes of keys and values stored as codes: source text for host and device.
#pragma once

#include "core/bits.hpp"

namespace lowbit {

// How keys and values are stored. Rows of codes are padded with zeros to a multiple of 32 elements.
enum class KvFormat : int { floating, int8, int4 };
constexpr int64_t kKvGroup = 32;  // elements per int4 scale; rows are padded to multiples of it
constexpr int64_t kMaxKvColumns = 512;  // max columns of codes: 512 * 127 * 32767 < 2^31

constexpr int64_t kv_padded(int64_t columns) { return (columns + kKvGroup - 1) / kKvGroup * kKvGroup; }
constexpr int64_t kv_row_bytes(KvFormat format, int64_t columns) {
  return kv_padded(columns) / (format == KvFormat::int4 ? 2 : 1);
}
constexpr int64_t kv_groups(KvFormat format, int64_t columns) {
  return format == KvFormat::int4 ? kv_padded(columns) / kKvGroup : 1;
}
// Keys may be rotated by a normalized Hadamard matrix (queries too, which keeps the scores) of the largest power of two
// that divides the row.
constexpr int64_t kv_rotation(int64_t columns) { return kv_padded(columns) & -kv_padded(columns); }

}  // namespace lowbit
