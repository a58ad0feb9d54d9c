// SPDX-License-Identifier: Apache-2.0
#include "recorder/settings.hpp"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>

#include "core/error.hpp"
#include "recorder/dispatch.hpp"

namespace lowbit::recorder {
namespace {

// The number in a variable; nothing if it is unset, empty, or not an acceptable number.
std::optional<double> number_in(const char* variable, bool (*wanted)(double), const std::string& in_words) {
  const char* const value = std::getenv(variable);
  if (!value || !*value) return {};
  char* end = nullptr;
  const double number = std::strtod(value, &end);
  if (*end == 0 && wanted(number)) return number;
  std::fprintf(stderr, "lowbit recorder: %s must be %s, got '%s'; it counts as not set\n", variable, in_words.c_str(),
               value);
  return {};
}

bool is_count(double number) { return number >= 0 && number <= kMaxRecords && number == static_cast<int>(number); }

Settings of_environment() {
  Settings found;
  const auto records = number_in("LOWBIT_RECORD", is_count,
                                 concat("0 (off), 1 (on) or a number of records up to ", kMaxRecords));
  found.timeout = number_in("LOWBIT_RECORD_TIMEOUT", is_timeout, "0 to 1e9 seconds");
  found.on = records ? *records > 0 : found.timeout.has_value();
  if (records && *records > 1) found.records = static_cast<uint32_t>(*records);
  if (const char* const folder = std::getenv("LOWBIT_RECORD_DIR")) found.folder = folder;
  return found;
}

Settings& known = *new Settings(of_environment());  // never destroyed: calls of other threads outlive exit()

}  // namespace

Settings& settings() { return known; }
std::atomic<int> wants{known.on ? kRing : 0};

uint32_t capacity_for(uint32_t records) { return std::max(16u, std::bit_ceil(records)); }

}  // namespace lowbit::recorder
