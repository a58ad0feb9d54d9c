// SPDX-License-Identifier: Apache-2.0
// The sizes of keys and values as codes: text for host and device.
#pragma once

#include "core/bits.hpp"

namespace lowbit {

// How keys and values are stored. Rows of codes are padded with zeros to a multiple of 32 elements.
enum class KvFormat : int { floating, int8, int4 };
constexpr int64_t kKvGroup = 32;  // elements of a scale of int4, and what rows are padded to
constexpr int64_t kMostKvColumns = 512;  // of codes: 512 * 127 * 32767 < 2^31

constexpr int64_t kv_padded(int64_t columns) { return (columns + kKvGroup - 1) / kKvGroup * kKvGroup; }
constexpr int64_t kv_row_bytes(KvFormat format, int64_t columns) {
  return kv_padded(columns) / (format == KvFormat::int4 ? 2 : 1);
}
constexpr int64_t kv_groups(KvFormat format, int64_t columns) {
  return format == KvFormat::int4 ? kv_padded(columns) / kKvGroup : 1;
}
// Keys may be rotated by a normalized Hadamard matrix (and queries with them, so that the scores stay): over the
// largest power of two that divides the row.
constexpr int64_t kv_rotation(int64_t columns) { return kv_padded(columns) & -kv_padded(columns); }

}  // namespace lowbit
