// SPDX-License-Identifier: Apache-2.0
// Dispatch opens a record of a call and closes it: run_selected (ops/kernel.hpp) holds one while a row runs.
#pragma once

#include <atomic>

#include "recorder/call.hpp"

namespace lowbit::recorder {

struct Record;
struct Ring;
struct Thread;

inline constexpr int kRing = 1, kProfile = 2;
LOWBIT_API extern std::atomic<int> wants;  // which of the two want records; see settings.hpp

inline bool wanted() { return wants.load(std::memory_order_relaxed) != 0; }

// RAII: the record of a call of this thread; marked as failed unless finished() was called.
class LOWBIT_API Dispatch {
 public:
  Dispatch(std::string_view op, std::string_view row, const Place& place, const Call& call);
  ~Dispatch() {
    if (open_) close(false);
  }
  Dispatch(const Dispatch&) = delete;
  Dispatch& operator=(const Dispatch&) = delete;

  void finished() { close(true); }

 private:
  void close(bool finished);

  Thread& thread_;
  Ring* ring_ = nullptr;  // null: not recorded
  Record* record_ = nullptr;
  Record* profiled_ = nullptr;
  uint64_t sequence_ = 0, profile_ = 0;
  bool open_ = true;
};

}  // namespace lowbit::recorder
