// SPDX-License-Identifier: Apache-2.0
// Memory of the simulated devices: for each a range of address space that is inaccessible (PROT_NONE) except while a
// run opens it. Host code that touches device memory dies on the spot, as it would with a discrete device.
#pragma once

#include <cstddef>

#include "core/private_use.hpp"

namespace lowbit::sim {

inline constexpr int kMaxDevices = 8;

// Reserves address space for `devices` of `bytes` each and claims PrivateUse1 for them; once per process.
LOWBIT_API void start(int devices, std::size_t bytes);
LOWBIT_API int device_count();  // 0 until start()

// Null for 0 bytes and if memory runs out: the caller raises the right error. 256-byte aligned, not zeroed.
LOWBIT_API void* allocate(int device, std::size_t bytes);
LOWBIT_API void deallocate(void* pointer) noexcept;
LOWBIT_API int device_of(const void* pointer);  // -1: not memory of a simulated device
LOWBIT_API MemoryUsage usage(int device);
LOWBIT_API void reset_peak(int device);
void copy(void* to, const void* from, std::size_t bytes);

// The constructor and the destructor of Open.
void open(int device, void* stream);
void close(int device);

// RAII: while one lives, all threads can access the memory of its device. The outermost one of a thread is a launch: it
// fails or takes longer as sim/faults.hpp prescribes, and is counted for its stream, whose handle is its number. -1 is
// the host: nothing is opened.
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
