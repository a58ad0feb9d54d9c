// SPDX-License-Identifier: Apache-2.0
// The file format of a flight recorder, and of a dump, which is a copy: a header of 4096 bytes, then `capacity` records
// of 256 bytes, little-endian, at the offsets that python/lowbit/recorder/ring.py reads. It is self-contained: the
// names of dtypes, devices and states are in the header.
#pragma once

#include <atomic>
#include <cstdint>

#include "recorder/call.hpp"

namespace lowbit::recorder {

inline constexpr char kMagic[8] = {'l', 'o', 'w', 'b', 'i', 't', 'F', 'R'};
inline constexpr uint32_t kVersion = 1;

enum class State : uint8_t { started, finished, failed };
inline constexpr std::string_view kStateNames[] = {"started", "finished", "failed"};

inline constexpr int kSequenceBits = 44;
inline constexpr uint64_t kSequenceMask = (uint64_t{1} << kSequenceBits) - 1;
inline constexpr uint64_t kBeingWritten = ~uint64_t{0};
constexpr bool is_whole(uint64_t mark) { return mark != 0 && mark != kBeingWritten; }

// `mark` is the sequence number + 1; 0: never written. `tail` is its lower half, written before and after everything
// else: if the record is rewritten while a reader copies it, `mark` and `tail` disagree.
struct Record {
  std::atomic<uint64_t> mark;
  uint64_t start_ns, end_ns;  // CLOCK_MONOTONIC; end_ns 0: running
  uint32_t thread;
  std::atomic<State> state;
  uint8_t device_type;
  int16_t device_index;
  uint8_t depth;  // number of calls of this thread around this one
  Arithmetic arithmetic;
  uint8_t dtype[Call::kTensors], rank[Call::kTensors];
  uint64_t stream;
  int64_t size[Call::kTensors][Call::kSizes];
  int64_t read, written, operations;
  char op[32], row[48];  // zero-terminated unless full
  int32_t group_sequence;  // sequence number of a collective in its process group; -1: none
  std::atomic<uint32_t> tail;
};
static_assert(sizeof(Record) == 256 && std::atomic<uint64_t>::is_always_lock_free);

struct Header {
  char magic[8];
  uint32_t version, header_bytes, record_bytes, capacity;  // capacity: a power of two
  int32_t pid;
  std::atomic<int32_t> rank, world;  // -1, 0: unknown
  uint32_t unused;
  uint64_t wall_ns, monotonic_ns;    // the same moment on both clocks
  alignas(64) std::atomic<uint64_t> next;  // lower kSequenceBits: number of the next call; above: slots skipped
  std::atomic<uint64_t> lost;              // calls without a record: each slot held a running call
  alignas(64) char host[64];
  char version_text[64];
  char names[768];          // JSON: {"state": [..], "dtype": [..], "device": [..], "arithmetic": [..]}
  char command_line[2048];  // arguments, each zero-terminated
  uint64_t taken_ns;        // time of the dump, CLOCK_MONOTONIC; 0: this is the ring itself
  char reason[512];         // reason of the dump
};
inline constexpr std::size_t kHeaderBytes = 4096;
static_assert(sizeof(Header) <= kHeaderBytes);

}  // namespace lowbit::recorder
