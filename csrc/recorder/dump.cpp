// SPDX-License-Identifier: Apache-2.0
// The records as JSON. Written by any thread, also where the one that holds Python's lock hangs: no allocation, no
// lock of ours, a buffer on the stack.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <ctime>

#include "core/error.hpp"
#include "recorder/ring.hpp"

namespace lowbit::recorder {
namespace {

class Json {
 public:
  explicit Json(int file) : file_(file) {}

  [[gnu::format(printf, 2, 3)]] void print(const char* format, ...) {
    if (sizeof buffer_ - used_ < 512) flush();
    va_list values;
    va_start(values, format);
    used_ += static_cast<std::size_t>(std::vsnprintf(buffer_ + used_, sizeof buffer_ - used_, format, values));
    va_end(values);
  }
  // A string that ends at a 0 or at `room`.
  void text(const char* from, std::size_t room) {
    print("\"");
    for (std::size_t i = 0; i < room && from[i]; i++) character(from[i]);
    print("\"");
  }
  bool flush() {
    for (std::size_t done = 0; done < used_ && !failed_;) {
      const ssize_t wrote = write(file_, buffer_ + done, used_ - done);
      if (wrote > 0) done += static_cast<std::size_t>(wrote);
      else if (errno != EINTR) failed_ = errno ? errno : EIO;
    }
    used_ = 0;
    return !failed_;
  }
  int failed() const { return failed_; }

 private:
  void character(char c) {
    const auto code = static_cast<unsigned char>(c);
    if (code < 0x20 || code >= 0x7f || c == '"' || c == '\\') print("\\u%04x", code);
    else print("%c", c);
  }

  int file_, failed_ = 0;
  std::size_t used_ = 0;
  char buffer_[16384];
};

template <class Names>
std::string_view named(const Names& names, std::size_t number) {
  return number < std::size(names) ? std::string_view(names[number]) : std::string_view("?");
}

void write_tensors(Json& json, const Record& record) {
  json.print("\"tensors\": [");
  for (int i = 0; i < Call::kTensors && record.dtype[i] < static_cast<int>(DType::other); i++) {
    json.print("%s{\"dtype\": \"%s\", \"rank\": %d, \"shape\": [", i ? ", " : "",
               name_of(static_cast<DType>(record.dtype[i])).data(), record.rank[i]);
    for (int dim = 0; dim < record.rank[i] && dim < Call::kSizes; dim++)
      json.print("%s%" PRId64, dim ? ", " : "", record.size[i][dim]);
    json.print("]}");
  }
  json.print("]");
}

void write_record(Json& json, const Record& record, uint64_t mark) {
  json.print("{\"sequence\": %" PRIu64 ", \"op\": ", mark - 1);
  json.text(record.op, sizeof record.op);
  json.print(", \"row\": ");
  json.text(record.row, sizeof record.row);
  const std::string_view device =
      record.device_type < kDeviceTypeCount ? name_of(static_cast<DeviceType>(record.device_type)) : "?";
  json.print(", \"state\": \"%s\", \"device\": \"%s\", \"index\": %d, \"stream\": %" PRIu64 ", \"thread\": %u",
             named(kStateNames, static_cast<std::size_t>(record.state.load())).data(), device.data(),
             record.device_index, record.stream, record.thread);
  json.print(", \"depth\": %d, \"start_ns\": %" PRIu64 ", \"end_ns\": %" PRIu64, record.depth, record.start_ns,
             record.end_ns);
  json.print(", \"arithmetic\": \"%s\", \"read\": %" PRId64 ", \"written\": %" PRId64 ", \"operations\": %" PRId64,
             named(kArithmeticNames, static_cast<std::size_t>(record.arithmetic)).data(), record.read, record.written,
             record.operations);
  json.print(", \"group_sequence\": %d, ", record.group_sequence);
  write_tensors(json, record);
  json.print("}");
}

void write_all(Json& json, const Ring& ring, std::string_view reason) {
  const Header& header = *ring.header;
  json.print("{\"lowbit_recorder\": %u, \"reason\": ", kVersion);
  json.text(reason.data(), reason.size());
  json.print(", \"host\": ");
  json.text(header.host, sizeof header.host);
  json.print(", \"pid\": %d, \"rank\": %d, \"world\": %d, \"wall_ns\": %" PRIu64 ", \"monotonic_ns\": %" PRIu64
             ", \"taken_ns\": %" PRIu64 ", \"capacity\": %u, \"next\": %" PRIu64 ", \"lost\": %" PRIu64
             ", \"command_line\": [",
             header.pid, header.rank.load(), header.world.load(), header.wall_ns, header.monotonic_ns, now_ns(),
             header.capacity, header.next.load() & kSequenceMask, header.lost.load());
  for (std::size_t at = 0; at < sizeof header.command_line && header.command_line[at];) {
    json.print(at ? ", " : "");
    json.text(header.command_line + at, sizeof header.command_line - at);
    at += strnlen(header.command_line + at, sizeof header.command_line - at) + 1;
  }
  json.print("], \"records\": [");
  bool first = true;
  for (uint32_t i = 0; i < header.capacity; i++) {
    const uint64_t mark = ring.records[i].mark.load(std::memory_order_acquire);
    if (!is_whole(mark)) continue;
    alignas(Record) char copy[sizeof(Record)];
    std::memcpy(copy, static_cast<const void*>(&ring.records[i]), sizeof copy);
    if (ring.records[i].mark.load(std::memory_order_acquire) != mark) continue;  // written anew meanwhile
    json.print(first ? "\n" : ",\n");
    first = false;
    write_record(json, *reinterpret_cast<const Record*>(copy), mark);
  }
  json.print("]}\n");
}

}  // namespace

std::string next_dump_path(const Ring& ring) {
  static std::atomic<int> count{0};
  if (ring.path.empty()) return "";
  return concat(ring.path.substr(0, ring.path.size() - 5), "-", ++count, ".json");  // without ".ring"
}

std::string write_dump(const Ring& ring, const std::string& path, std::string_view reason) {
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (file < 0) return concat("cannot write ", path, ": ", std::strerror(errno));
  Json json(file);
  write_all(json, ring, reason);
  const bool whole = json.flush();
  close(file);
  return whole ? "" : concat("cannot write ", path, ": ", std::strerror(json.failed()));
}

}  // namespace lowbit::recorder
