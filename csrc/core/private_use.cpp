// SPDX-License-Identifier: Apache-2.0
#include "core/private_use.hpp"

#include <atomic>

namespace lowbit {
namespace {

std::atomic<const PrivateUse*> claimed{nullptr};

}  // namespace

void claim_private_use(const PrivateUse& device) {
  const PrivateUse* before = nullptr;
  if (claimed.compare_exchange_strong(before, &device) || before == &device) return;
  throw Error(ErrorKind::runtime, concat(name_of(device.type), ": torch has one place for a device of this kind in a ",
                                         "process, and ", name_of(before->type), " has taken it"));
}

const PrivateUse& private_use() {
  const PrivateUse* const device = claimed.load(std::memory_order_acquire);
  check(device != nullptr, ErrorKind::runtime, "no device of lowbit's own is enabled in this process");
  return *device;
}

bool owns_its_numbers(DeviceType type) {
  if (kDeviceTypes[static_cast<int>(type)].dlpack != kPrivateUse) return true;
  const PrivateUse* const device = claimed.load(std::memory_order_acquire);
  return device && device->type == type;
}

}  // namespace lowbit
