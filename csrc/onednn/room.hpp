// SPDX-License-Identifier: Apache-2.0
// Memory of a call, of the calling thread.
#pragma once

#include <cstdlib>
#include <new>
#include <utility>

#include "core/bits.hpp"

namespace lowbit::onednn {

// Memory of this thread, kept between calls: a call's copy of a weight is as large as the weight, and fresh pages cost
// as much as the product of a few rows.
class Room {
 public:
  ~Room() { std::free(data_); }
  char* of(int64_t bytes) {
    if (bytes_ >= bytes) return data_;
    std::free(std::exchange(data_, nullptr));
    bytes_ = 0;
    data_ = static_cast<char*>(std::aligned_alloc(4096, static_cast<std::size_t>(round_up(bytes, 4096))));
    if (!data_) throw std::bad_alloc();
    bytes_ = round_up(bytes, 4096);
    return data_;
  }

 private:
  char* data_ = nullptr;
  int64_t bytes_ = 0;
};
inline thread_local Room room;

// Parts of a room, each 64-byte aligned.
struct Parts {
  char* begin = nullptr;
  int64_t bytes = 0;
  template <class T>
  T* take(int64_t count) {
    T* const part = begin ? reinterpret_cast<T*>(begin + bytes) : nullptr;
    bytes += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return part;
  }
};

// What `take` takes: counted first, then in the room of this thread.
template <class Call, class Take>
Call in_room(Take&& take) {
  Parts counted;
  take(counted);
  Parts parts{room.of(counted.bytes)};
  return take(parts);
}

}  // namespace lowbit::onednn
