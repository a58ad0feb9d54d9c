// SPDX-License-Identifier: Apache-2.0
// The records of a profile: all of them, in memory, while one runs.
#pragma once

#include <string>

#include "recorder/ring.hpp"

namespace lowbit::recorder {

// Profiles may overlap and share their records: each has those since its begin. Returns that place.
LOWBIT_API int64_t begin_profile();
LOWBIT_API std::string end_profile(int64_t from);  // the records, 256 bytes each; the last profile that ends frees them

Record* open_profiled(const Entry& entry, uint64_t& profile);
void close_profiled(Record* record, uint64_t profile, State state);
void forget_profiles();  // in a forked child: they are the parent's

}  // namespace lowbit::recorder
