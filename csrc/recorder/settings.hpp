// SPDX-License-Identifier: Apache-2.0
// Whether this process records its calls, how many, and where: set by the environment when the library is loaded, and
// by start() (ring.hpp) later. An invalid variable is reported on stderr and ignored.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace lowbit::recorder {

inline constexpr uint32_t kMaxRecords = 1 << 20;

struct Settings {
  bool on = false;                // LOWBIT_RECORD is above 0, or is unset and there is a timeout
  uint32_t records = 2048;        // LOWBIT_RECORD above 1
  std::string folder;             // LOWBIT_RECORD_DIR; empty: the default
  std::optional<double> timeout;  // LOWBIT_RECORD_TIMEOUT, seconds
};
Settings& settings();

// The ring's capacity for that many records: a power of two, at least 16.
uint32_t capacity_for(uint32_t records);

constexpr bool is_timeout(double seconds) { return seconds >= 0 && seconds <= 1e9; }

}  // namespace lowbit::recorder
