// SPDX-License-Identifier: Apache-2.0
// The ring of records of this process: a shared mapping of a file, so that the records survive a SIGKILL or a segfault
// without any code to dump them. It exists only if the environment or start() asks for it, and is created by start(),
// else by the first call; a forked child creates its own. Calls never fail because of it: if no file can be created,
// the ring is in memory and stderr says once why.
#pragma once

#include <optional>
#include <string>

#include "recorder/clock.hpp"
#include "recorder/record.hpp"

namespace lowbit::recorder {

struct Ring {
  Header* header = nullptr;
  Record* records = nullptr;
  std::string path;    // empty: no file
  std::string reason;  // why there is no file

  std::size_t bytes() const { return kHeaderBytes + std::size_t{header->capacity} * sizeof(Record); }
};

// The ring of this process; null: the recorder is off, or there is no memory.
LOWBIT_API Ring* ring();
LOWBIT_API Ring* ring_if_made();
// Turns the recorder on and creates its file; records {}, folder "": the environment's values, and no effect if it is
// on already. An error if the existing ring has other records or another folder, or no file can be created.
LOWBIT_API void start(std::optional<int64_t> records, const std::string& folder);

// A record of the call without mark and tail.
struct Entry {
  std::string_view op, row;
  const Place& place;
  const Call& call;
  Thread& thread;
  int32_t group_sequence = -1;
};

struct Claim {
  Record* record = nullptr;  // null: each slot held a running call
  uint64_t sequence = 0;
};
LOWBIT_API Claim open_record(Ring& ring, const Entry& entry);
// No effect if another call has taken the slot.
LOWBIT_API void close_record(Ring& ring, const Claim& claim, State state, Thread& thread);

void fill(Record& record, const Entry& entry);

// The oldest call that is still running.
struct Oldest {
  const Record* record = nullptr;
  uint64_t sequence = 0, start_ns = 0;
};
Oldest oldest_started(const Ring& ring);

LOWBIT_API std::string names_of_numbers();  // the names of the numbers in records: JSON
// The chosen folder, else $XDG_RUNTIME_DIR/lowbit, else lowbit-<uid> in /dev/shm or /tmp.
LOWBIT_API std::string folder();

// Writes a copy of the file; returns why it failed, or "". Takes no locks, so any thread may call it, even if the
// holder of the GIL hangs. A record that is rewritten meanwhile is recognized by its tail.
LOWBIT_API std::string write_dump(const Ring& ring, const std::string& path, std::string_view reason);
LOWBIT_API std::string next_dump_path(const Ring& ring);  // beside the ring's file; empty if it has none

}  // namespace lowbit::recorder
