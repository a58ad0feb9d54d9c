// SPDX-License-Identifier: Apache-2.0
// Some bytes of many places between host and device. Memory of our own device the host reads and writes in place; that
// of torch's own xpu it cannot, and the device copies them.
#pragma once

#include <cstring>

#include "level_zero/runtime/driver.hpp"

namespace lowbit::level_zero {

// The host's side must live until finish() returns, which must be called.
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
