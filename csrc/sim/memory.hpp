// SPDX-License-Identifier: Apache-2.0
// Memory of the simulated devices: for each a piece of address space that cannot be read or written (PROT_NONE) but
// while a run is open on it. Host code that touches device memory dies at that spot, as it would on a device whose
// memory is its own.
#pragma once

#include <cstddef>

#include "core/private_use.hpp"

namespace lowbit::sim {

inline constexpr int kMaxDevices = 8;

// Reserves address space for `devices` of `bytes` each and claims torch's place for them; once per process.
LOWBIT_API void start(int devices, std::size_t bytes);
LOWBIT_API int device_count();  // 0 until start()

// Null for 0 bytes and where there is no room: the caller knows the right error for that. 256-byte aligned, not zeroed.
LOWBIT_API void* allocate(int device, std::size_t bytes);
LOWBIT_API void deallocate(void* pointer) noexcept;
LOWBIT_API int device_of(const void* pointer);  // -1: not memory of a simulated device
LOWBIT_API MemoryUsage usage(int device);
LOWBIT_API void reset_peak(int device);
void copy(void* to, const void* from, std::size_t bytes);

// The begin and the end of an Open.
void open(int device, void* stream);
void close(int device);

// While one lives, the memory of its device can be read and written, from any thread. The outermost one of a thread is
// a launch: it fails or takes longer as set in sim/faults.hpp, and is counted for its stream, whose handle is its
// number. -1 stands for the host: nothing is opened.
class LOWBIT_API Open {
 public:
  explicit Open(int device, void* stream = nullptr);
  ~Open();
  Open(const Open&) = delete;
  Open& operator=(const Open&) = delete;

 private:
  int device_;
};

}  // namespace lowbit::sim
