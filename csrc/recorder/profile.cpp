// SPDX-License-Identifier: Apache-2.0
#include "recorder/profile.hpp"

#include <deque>
#include <mutex>
#include <new>

#include "core/error.hpp"
#include "recorder/dispatch.hpp"

namespace lowbit::recorder {
namespace {

// A lock, because the buffer grows.
std::mutex mutex;
std::deque<Record> kept;  // never moved
int profiling = 0;
uint64_t number = 0;  // number of the period; one ends when no profile is left

}  // namespace

int64_t begin_profile() {
  const std::lock_guard lock(mutex);
  if (profiling++ == 0) number++;
  wants.fetch_or(kProfile);
  return static_cast<int64_t>(kept.size());
}

std::string end_profile(int64_t from) {
  const std::lock_guard lock(mutex);
  check(profiling > 0 && from >= 0 && from <= static_cast<int64_t>(kept.size()), ErrorKind::runtime,
        "profile: it had ended already");
  std::string records;
  records.reserve((kept.size() - static_cast<std::size_t>(from)) * sizeof(Record));
  for (auto record = kept.begin() + from; record != kept.end(); ++record)
    records.append(reinterpret_cast<const char*>(&*record), sizeof(Record));
  if (--profiling == 0) {
    wants.fetch_and(~kProfile);
    kept.clear();
    number++;
  }
  return records;
}

Record* open_profiled(const Entry& entry, uint64_t& profile) {
  const std::lock_guard lock(mutex);
  if (profiling == 0) return nullptr;
  profile = number;
  Record& record = kept.emplace_back();
  fill(record, entry);
  record.mark = kept.size(), record.tail = static_cast<uint32_t>(kept.size());
  return &record;
}

void close_profiled(Record* record, uint64_t profile, State state) {
  const uint64_t now = now_ns();
  const std::lock_guard lock(mutex);
  if (profile != number) return;  // the profile ended during the call
  record->end_ns = now;
  record->state = state;
}

void forget_profiles() {
  new (&mutex) std::mutex;
  if (!(wants.fetch_and(~kProfile) & kProfile)) return;
  new (&kept) std::deque<Record>;  // the old one may be half written, and is leaked
  profiling = 0, number++;
}

}  // namespace lowbit::recorder
