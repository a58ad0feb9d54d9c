// SPDX-License-Identifier: Apache-2.0
// Scattered small copies between host and device. The host accesses memory of our own device in place; it cannot access
// that of torch's own xpu, which the device copies.
#pragma once

#include <cstring>

#include "level_zero/runtime/driver.hpp"

namespace lowbit::level_zero {

// Host memory must live until finish() returns, which must be called.
class Copies {
 public:
  explicit Copies(Device device) : device_(device) {}

  void add(void* to, const void* from, std::size_t bytes) const {
    if (is_shared()) {
      std::memcpy(to, from, bytes);
      return;
    }
    const Gpu& on = gpu(device_);
    const std::lock_guard lock(*on.mutex);
    ensure(api().append_copy(on.list, to, from, bytes, nullptr, 0, nullptr), "zeCommandListAppendMemoryCopy");
  }

  void finish() const {
    if (!is_shared()) wait(device_);
  }

 private:
  bool is_shared() const { return device_.type == DeviceType::level_zero; }

  Device device_;
};

}  // namespace lowbit::level_zero
