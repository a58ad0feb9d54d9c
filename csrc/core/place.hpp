// SPDX-License-Identifier: Apache-2.0
// Where memory lies and where work runs. A view has a device; a call has a place: its device, the stream that its work
// joins, and where it gets the memory that it needs beside its arguments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace lowbit {

// A device room adds its line here and in kDeviceNames.
enum class DeviceType : uint8_t { cpu, simulated };
inline constexpr std::string_view kDeviceNames[] = {"cpu", "cpu_sim"};

struct Device {
  DeviceType type = DeviceType::cpu;
  int16_t index = 0;

  friend constexpr bool operator==(const Device&, const Device&) = default;
};

inline std::string name_of(Device device) {
  std::string name(kDeviceNames[static_cast<int>(device.type)]);
  return device.type == DeviceType::cpu ? name : name + ":" + std::to_string(device.index);
}

struct Place;

// Memory of a place, given back in the order of its stream: torch's allocator where torch is, else the device's own.
struct Memory {
  void* (*allocate)(const Place& place, std::size_t bytes);  // 256-byte aligned; throws std::bad_alloc
  void (*release)(const Place& place, void* data, std::size_t bytes);
};

struct Place {
  Device device{};
  void* stream = nullptr;          // null: the device's default; a CPU has none
  const Memory* memory = nullptr;  // null: the kernels' own scratch (a CPU's threads keep theirs)
};

}  // namespace lowbit
