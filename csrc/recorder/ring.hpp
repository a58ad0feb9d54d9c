// SPDX-License-Identifier: Apache-2.0
// The ring of records of this process: a shared mapping of a file, so that the records survive a SIGKILL or a segfault
// with no code that dumps them. There is none until the environment or start() asks for it. Made by start(), else at
// the first call; a forked child makes its own. No call fails: where no file can be made, the ring is in memory and
// stderr says once why.
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
  std::string reason;  // why there is none

  std::size_t bytes() const { return kHeaderBytes + std::size_t{header->capacity} * sizeof(Record); }
};

// The ring of this process; null: the recorder is off, or there is no memory for it.
LOWBIT_API Ring* ring();
LOWBIT_API Ring* ring_if_made();
// Turns the recorder on, and makes its file; records {}, folder "": as the environment says, nothing if it is on
// already. An error: other records or another folder than those of the ring that there is, or no file can be made.
LOWBIT_API void start(std::optional<int64_t> records, const std::string& folder);

// A record of the call with everything but mark and tail.
struct Entry {
  std::string_view op, row;
  const Place& place;
  const Call& call;
  Thread& thread;
  int32_t group_sequence = -1;
};

struct Claim {
  Record* record = nullptr;  // null: every place held a call that still runs
  uint64_t sequence = 0;
};
LOWBIT_API Claim open_record(Ring& ring, const Entry& entry);
// Nothing if the place holds another call by now.
LOWBIT_API void close_record(Ring& ring, const Claim& claim, State state, Thread& thread);

void fill(Record& record, const Entry& entry);

// The oldest call that has not ended.
struct Oldest {
  const Record* record = nullptr;
  uint64_t sequence = 0, start_ns = 0;
};
Oldest oldest_started(const Ring& ring);

LOWBIT_API std::string names_of_numbers();  // in records: JSON
// The chosen one, else $XDG_RUNTIME_DIR/lowbit, else lowbit-<uid> in /dev/shm or /tmp.
LOWBIT_API std::string folder();

// Writes a copy of the file; "" or why it could not. Any thread may, also where the one that holds Python's lock hangs:
// no lock of ours. A record that is rewritten meanwhile is known by its tail.
LOWBIT_API std::string write_dump(const Ring& ring, const std::string& path, std::string_view reason);
LOWBIT_API std::string next_dump_path(const Ring& ring);  // beside the file of the ring; empty where it has none

}  // namespace lowbit::recorder
