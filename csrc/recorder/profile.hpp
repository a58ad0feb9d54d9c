// SPDX-License-Identifier: Apache-2.0
// The records of a profile: kept in memory, all of them, while one runs.
#pragma once

#include <string>

#include "recorder/ring.hpp"

namespace lowbit::recorder {

// Profiles may overlap and share records: each has those since its begin. Returns the index of its first record.
LOWBIT_API int64_t begin_profile();
LOWBIT_API std::string end_profile(int64_t from);  // records of 256 bytes each, freed at the end of the last profile

Record* open_profiled(const Entry& entry, uint64_t& profile);
void close_profiled(Record* record, uint64_t profile, State state);
void forget_profiles();  // in a forked child: they belong to the parent

}  // namespace lowbit::recorder
