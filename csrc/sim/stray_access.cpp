// SPDX-License-Identifier: Apache-2.0
#include "sim/stray_access.hpp"

#include <cstdint>

#include "core/os.hpp"

namespace lowbit::sim {
namespace {

uintptr_t first = 0;
std::size_t length = 0, device_length = 1;

void on_fault(const void* address) {  // no allocation, no stdio
  const auto offset = reinterpret_cast<uintptr_t>(address) - first;
  if (offset >= length) return;
  const char digit = static_cast<char>('0' + offset / device_length);
  os::say("\nlowbit_sim:");
  os::say({&digit, 1});
  os::say(": host code touched device memory outside a run (a data_ptr() read on the CPU, or a kernel given the wrong "
          "tensor)\n");
}

}  // namespace

void watch_for_stray_access(const void* base, std::size_t bytes, std::size_t per_device) {
  first = reinterpret_cast<uintptr_t>(base), length = bytes, device_length = per_device;
  os::on_fault(on_fault);
}

}  // namespace lowbit::sim
