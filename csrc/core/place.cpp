// SPDX-License-Identifier: Apache-2.0
#include "core/place.hpp"

#include <atomic>

namespace lowbit {
namespace {

std::atomic<void* (*)(Device)> keeper_of_streams{nullptr};
std::atomic<const MemoryKeeper*> keeper_of_memory{nullptr};

}  // namespace

DeviceType device_type(std::string_view op, std::string_view name) {
  std::string names;
  for (int i = 0; i < kDeviceTypeCount; i++) {
    if (kDeviceTypes[i].name == name) return static_cast<DeviceType>(i);
    names += concat(i ? ", " : "", kDeviceTypes[i].name);
  }
  throw Error(ErrorKind::value, concat(op, ": device must be one of ", names, ", got '", name, "'"));
}

void* current_stream(Device device) {
  auto* const keeper = keeper_of_streams.load(std::memory_order_acquire);
  return keeper && device.type != DeviceType::cpu ? keeper(device) : nullptr;
}

void ask_for_streams(void* (*keeper)(Device device)) { keeper_of_streams.store(keeper, std::memory_order_release); }

Workspace::Workspace(std::string_view op, const Place& place, int64_t bytes) {
  const MemoryKeeper* keeper = keeper_of_memory.load(std::memory_order_acquire);
  check(keeper != nullptr, ErrorKind::runtime, op, ": cannot allocate memory on ", name_of(place.device),
        ": import torch first, which owns the allocator of this device");
  memory_ = keeper->take(op, place.device, bytes, &data_);
}

Workspace::~Workspace() { keeper_of_memory.load(std::memory_order_acquire)->give_back(memory_); }

void ask_for_memory(const MemoryKeeper* keeper) { keeper_of_memory.store(keeper, std::memory_order_release); }

}  // namespace lowbit
