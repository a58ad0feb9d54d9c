// SPDX-License-Identifier: Apache-2.0
// Stands for torch's libc10_xpu.so: a queue of device 0 with one piece of work, done when it is waited for.
#include <cstdint>

void (*queued_by_torch)() = nullptr;

namespace c10::xpu {
void syncStreamsOnDevice(int8_t device) {
  if (device == 0 && queued_by_torch) queued_by_torch();
}
}  // namespace c10::xpu
