// SPDX-License-Identifier: Apache-2.0
// The ring of records of this process: a shared mapping of a file, so that the records survive a SIGKILL or a segfault
// with no code that dumps them. Made at the first call; a forked child makes its own. Nothing here fails a program:
// where no file can be made, the ring is in memory and stderr says once why.
#pragma once

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

// The ring of this process; null: LOWBIT_FR=0, or there is no memory for it.
LOWBIT_API Ring* ring();
LOWBIT_API Ring* ring_if_made();

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
LOWBIT_API std::string folder();  // LOWBIT_FR_DIR, else $XDG_RUNTIME_DIR/lowbit, else lowbit-<uid> in /dev/shm or /tmp

// Writes a copy of the file; "" or why it could not. Any thread may, also where the one that holds Python's lock hangs:
// no lock of ours. A record that is rewritten meanwhile is known by its tail.
LOWBIT_API std::string write_dump(const Ring& ring, const std::string& path, std::string_view reason);
LOWBIT_API std::string next_dump_path(const Ring& ring);  // beside the file of the ring; empty where it has none

}  // namespace lowbit::recorder
