// SPDX-License-Identifier: Apache-2.0
#include "recorder/ring.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>
#include <utility>

#include "core/error.hpp"
#include "recorder/dispatch.hpp"
#include "recorder/folder.hpp"
#include "recorder/profile.hpp"
#include "recorder/settings.hpp"
#include "recorder/watcher.hpp"

namespace lowbit::recorder {
namespace {

std::atomic<Ring*> made{nullptr};
std::atomic_flag making = ATOMIC_FLAG_INIT;
os::MappedFile& file = *new os::MappedFile;  // of `made`; never destroyed: it is removed at exit
std::atomic<bool> forked{false};

int environment_number(std::initializer_list<const char*> names, int otherwise) {
  for (const char* name : names)
    if (const char* value = std::getenv(name); value && *value) return std::atoi(value);
  return otherwise;
}

template <std::size_t count>
std::string quoted(const std::string_view (&names)[count]) {
  std::string text;
  for (std::string_view name : names) text += concat(text.empty() ? "\"" : ", \"", name, "\"");
  return text;
}

void copy_text(char* to, std::size_t room, std::string_view text) {
  const std::size_t length = std::min(text.size(), room);
  std::memcpy(to, text.data(), length);
  std::memset(to + length, 0, room - length);
}

uint64_t wall_ns() {
  const std::chrono::nanoseconds now = std::chrono::system_clock::now().time_since_epoch();
  return static_cast<uint64_t>(now.count());
}

void write_header(Header& header, uint32_t records) {
  header.version = kVersion, header.header_bytes = kHeaderBytes, header.record_bytes = sizeof(Record),
  header.capacity = records;
  header.pid = os::process_number();
  const bool own = !forked;  // a forked worker inherits the variables of its parent, but is no rank
  header.rank = own ? environment_number({"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"}, -1) : -1;
  header.world = own ? environment_number({"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"}, 0) : 0;
  header.wall_ns = wall_ns(), header.monotonic_ns = now_ns();
  copy_text(header.host, sizeof header.host - 1, os::host_name());
  copy_text(header.version_text, sizeof header.version_text, "lowbit flight recorder; python -m lowbit recorder DIR");
  copy_text(header.names, sizeof header.names, names_of_numbers());
  copy_text(header.command_line, sizeof header.command_line - 1, os::command_line());
  std::atomic_thread_fence(std::memory_order_release);
  std::memcpy(header.magic, kMagic, sizeof kMagic);
}

std::size_t wanted_bytes() { return kHeaderBytes + std::size_t{capacity_for(settings().records)} * sizeof(Record); }

Ring* ring_in(void* memory) {
  auto* const ring = new Ring;
  ring->header = new (memory) Header{};
  ring->records = reinterpret_cast<Record*>(static_cast<char*>(memory) + kHeaderBytes);
  ring->reason = file.reason;
  if (file.data) ring->path = file.path;
  write_header(*ring->header, capacity_for(settings().records));
  return ring;
}

// In memory if no file can be created; null if there is no memory either.
Ring* make_ring() {
  file = make_file(wanted_bytes());
  if (file.data) return ring_in(file.data);
  std::fprintf(stderr,
               "lowbit recorder: %s; records are kept in memory, where a crash takes them (LOWBIT_RECORD_DIR names "
               "another folder)\n",
               file.reason.c_str());
  if (void* const memory = ::operator new(wanted_bytes(), std::align_val_t{kHeaderBytes}, std::nothrow))
    return ring_in(std::memset(memory, 0, wanted_bytes()));
  wants.fetch_and(~kRing);
  return nullptr;
}

// One thread creates the ring; the others wait.
class Making {
 public:
  Making() {
    while (making.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
  }
  ~Making() { making.clear(std::memory_order_release); }
  Making(const Making&) = delete;
  Making& operator=(const Making&) = delete;
};

void in_the_child() {
  os::close_in_child(file);
  made = nullptr, forked = true, this_thread().number = 0;
  making.clear();
  forget_watcher(), forget_profiles();
}
[[gnu::constructor]] void watch_fork() { os::in_forked_child(in_the_child); }

// If all calls are finished at exit, there is nothing to report.
[[gnu::destructor]] void remove_at_exit() {
  const Ring* const ring = made.load();
  if (!ring || ring->path.empty() || ring->header->pid != os::process_number()) return;
  for (uint32_t i = 0; i < ring->header->capacity; i++)
    if (is_whole(ring->records[i].mark) && ring->records[i].state != State::finished) return;
  os::remove_file(file);
}

}  // namespace

std::string names_of_numbers() {
  std::string dtypes, devices;
  for (int i = 0; i <= static_cast<int>(DType::other); i++)
    dtypes += concat(i ? ", \"" : "\"", name_of(static_cast<DType>(i)), "\"");
  for (const DeviceTypeInfo& device : kDeviceTypes)
    devices += concat(devices.empty() ? "\"" : ", \"", device.name, "\"");
  return concat("{\"state\": [", quoted(kStateNames), "], \"dtype\": [", dtypes, "], \"device\": [", devices,
                "], \"arithmetic\": [", quoted(kArithmeticNames), "]}");
}

Ring* ring_if_made() { return made.load(std::memory_order_acquire); }

Ring* ring() {
  if (Ring* const found = made.load(std::memory_order_acquire)) return found;
  if (!(wants.load() & kRing)) return nullptr;
  {
    const Making lock;
    Ring* const found = made.load();
    if (found || !(wants.load() & kRing)) return found;  // another thread made it in the meantime
    made.store(make_ring(), std::memory_order_release);
  }
  if (made.load()) watch_new_ring();
  return made.load();
}

void start(std::optional<int64_t> records, const std::string& in) {
  check(!records || (*records >= 1 && *records <= kMaxRecords), ErrorKind::value, "start: records must be 1 to ",
        kMaxRecords, ", got ", records.value_or(0));
  if ((wants.load() & kRing) && !records && in.empty()) return;
  {
    const Making lock;
    Settings asked = settings();
    asked.on = true;
    if (records) asked.records = static_cast<uint32_t>(*records);
    if (!in.empty()) asked.folder = in;
    if (const Ring* const ring = made.load()) {
      check(capacity_for(asked.records) == ring->header->capacity && asked.folder == settings().folder,
            ErrorKind::runtime, "start: the recorder is on already, for ", ring->header->capacity, " records in ",
            ring->path.empty() ? "memory" : ring->path, "; got other records or another folder");
      return;
    }
    const Settings before = std::exchange(settings(), asked);
    file = make_file(wanted_bytes());
    if (!file.data) settings() = before;
    check(file.data != nullptr, ErrorKind::runtime, "start: ", file.reason);
    made.store(ring_in(file.data), std::memory_order_release);
    wants.fetch_or(kRing);
  }
  watch_new_ring();
}

void fill(Record& record, const Entry& entry) {
  const auto& [op, row, place, call, thread, group_sequence] = entry;
  if (thread.number == 0) thread.number = os::thread_number();
  record.end_ns = 0;
  record.thread = thread.number;
  record.device_type = static_cast<uint8_t>(place.device.type), record.device_index = place.device.index;
  record.depth = static_cast<uint8_t>(thread.depth);
  record.arithmetic = call.arithmetic;
  for (int i = 0; i < Call::kTensors; i++)
    record.dtype[i] = static_cast<uint8_t>(call.dtype[i]), record.rank[i] = call.rank[i];
  record.stream = reinterpret_cast<uint64_t>(place.stream);
  std::memcpy(record.size, call.size.data(), sizeof record.size);
  record.read = call.read, record.written = call.written, record.operations = call.operations;
  std::memset(record.op, 0, sizeof record.op + sizeof record.row);  // one run of vector stores
  std::memcpy(record.op, op.data(), std::min(op.size(), sizeof record.op));
  std::memcpy(record.row, row.data(), std::min(row.size(), sizeof record.row));
  record.group_sequence = group_sequence;
  record.state.store(State::started, std::memory_order_relaxed);
  record.start_ns = now_ns(thread);
}

// A slot with a running call is skipped: a call that hangs stays in the ring, however many calls follow. `next` counts
// calls in its lower bits and skipped slots in the upper ones, so that each addition gives one thread one slot.
Claim open_record(Ring& ring, const Entry& entry) {
  Header& header = *ring.header;
  uint64_t counts = header.next.fetch_add(1, std::memory_order_relaxed);
  const uint64_t sequence = counts & kSequenceMask;
  for (uint32_t tries = 0; tries < header.capacity; tries++) {
    Record& record = ring.records[((counts & kSequenceMask) + (counts >> kSequenceBits)) & (header.capacity - 1)];
    const uint64_t mark = record.mark.load(std::memory_order_acquire);
    if (mark == kBeingWritten || (mark != 0 && record.state.load(std::memory_order_relaxed) == State::started)) {
      counts = header.next.fetch_add(uint64_t{1} << kSequenceBits, std::memory_order_relaxed);
      continue;
    }
    record.mark.store(kBeingWritten, std::memory_order_relaxed);
    record.tail.store(static_cast<uint32_t>(kBeingWritten), std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    fill(record, entry);
    record.tail.store(static_cast<uint32_t>(sequence + 1), std::memory_order_release);
    record.mark.store(sequence + 1, std::memory_order_release);
    // Prefetches the slot of the next call while the row runs.
    const char* const next = reinterpret_cast<const char*>(
        ring.records + (((counts & kSequenceMask) + (counts >> kSequenceBits) + 1) & (header.capacity - 1)));
    for (std::size_t line = 0; line < sizeof(Record); line += 64) __builtin_prefetch(next + line, 1);
    return {&record, sequence};
  }
  header.lost.fetch_add(1, std::memory_order_relaxed);
  return {};
}

void close_record(Ring& ring, const Claim& claim, State state, Thread& thread) {
  // The second condition: a child that was forked during the call.
  if (!claim.record || made.load(std::memory_order_acquire) != &ring) return;
  if (claim.record->mark.load(std::memory_order_acquire) != claim.sequence + 1) return;
  claim.record->end_ns = now_ns(thread);
  claim.record->state.store(state, std::memory_order_release);
}

Oldest oldest_started(const Ring& ring) {
  Oldest oldest;
  for (uint32_t i = 0; i < ring.header->capacity; i++) {
    const Record& record = ring.records[i];
    const uint64_t mark = record.mark.load(std::memory_order_acquire);
    if (!is_whole(mark) || record.state.load() != State::started) continue;
    if (!oldest.record || record.start_ns < oldest.start_ns) oldest = {&record, mark - 1, record.start_ns};
  }
  return oldest;
}

std::string next_dump_path(const Ring& ring) {
  static std::atomic<int> count{0};
  if (ring.path.empty()) return "";
  return concat(ring.path.substr(0, ring.path.size() - 5), "-", ++count, ".dump");  // without ".ring"
}

std::string write_dump(const Ring& ring, const std::string& path, std::string_view reason) {
  alignas(Header) char head[kHeaderBytes];
  std::memcpy(head, static_cast<const void*>(ring.header), sizeof head);
  auto& header = *reinterpret_cast<Header*>(head);
  header.taken_ns = now_ns();
  copy_text(header.reason, sizeof header.reason, reason);
  return os::write_file(path, {{head, sizeof head},
                               {reinterpret_cast<const char*>(ring.records), ring.bytes() - kHeaderBytes}});
}

}  // namespace lowbit::recorder
