// SPDX-License-Identifier: Apache-2.0
#include "core/scratch.hpp"

#include <cstdlib>
#include <cstring>
#include <new>

#include "core/arena.hpp"

namespace lowbit {
namespace {

struct Buffer {
  void* data = nullptr;
  std::size_t bytes = 0;
  ~Buffer() { std::free(data); }
};

}  // namespace

void* scratch(Scratch slot, std::size_t bytes) {
  thread_local Buffer buffers[static_cast<int>(Scratch::count)];
  Buffer& buffer = buffers[static_cast<int>(slot)];
  if (buffer.bytes < bytes) {
    std::free(buffer.data);
    buffer.bytes = (bytes + 4095) / 4096 * 4096;
    buffer.data = std::aligned_alloc(4096, buffer.bytes);
    if (!buffer.data) {
      buffer.bytes = 0;
      throw std::bad_alloc();
    }
  }
  if (kRedZones) {  // bytes of the last call have no owner: they become NaN. Bytes that this call did not ask for are
                    // forbidden
    LOWBIT_ALLOW(buffer.data, buffer.bytes);
    std::memset(buffer.data, 0xff, bytes);
    LOWBIT_FORBID(static_cast<char*>(buffer.data) + bytes, buffer.bytes - bytes);
  }
  return buffer.data;
}

}  // namespace lowbit
