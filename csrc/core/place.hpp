// SPDX-License-Identifier: Apache-2.0
// Where memory lies and where work runs. A view has a device; a call has a place: its device, and the stream that its
// work joins.
#pragma once

#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>

#include "core/error.hpp"

namespace lowbit {

// One line per device type: its name, as torch prints it; the suffix of torch's C function for it
// (aoti_torch_device_type_<>); its number in DLPack.
#define LOWBIT_DEVICES(X) \
  X(cpu, "cpu", "cpu", 1) \
  X(cuda, "cuda", "cuda", 2) \
  X(xpu, "xpu", "xpu", 14) \
  X(level_zero, "lowbit_ze", "privateuse1", 12) \
  X(simulated, "lowbit_sim", "privateuse1", 12)

#define LOWBIT_DEVICE(type, name, torch_name, dlpack) type,
enum class DeviceType : uint8_t { LOWBIT_DEVICES(LOWBIT_DEVICE) };
#undef LOWBIT_DEVICE

struct DeviceTypeInfo {
  std::string_view name, torch_name;
  int dlpack;
};
inline constexpr DeviceTypeInfo kDeviceTypes[] = {
#define LOWBIT_DEVICE(type, name, torch_name, dlpack) {name, torch_name, dlpack},
    LOWBIT_DEVICES(LOWBIT_DEVICE)
#undef LOWBIT_DEVICE
};
inline constexpr int kDeviceTypeCount = static_cast<int>(std::size(kDeviceTypes));

constexpr std::string_view name_of(DeviceType type) { return kDeviceTypes[static_cast<int>(type)].name; }

LOWBIT_API DeviceType device_type(std::string_view op, std::string_view name);  // ValueError for an unknown name

struct Device {
  DeviceType type = DeviceType::cpu;
  int16_t index = 0;

  friend constexpr bool operator==(const Device&, const Device&) = default;
};

inline std::string name_of(Device device) {
  const std::string name(name_of(device.type));
  return device.type == DeviceType::cpu ? name : name + ":" + std::to_string(device.index);
}

struct Place {
  Device device{};
  void* stream = nullptr;  // the device's stream handle; null: its default stream. A CPU has none
};

// The stream that this thread's work on a device joins. torch keeps it; null if torch is not loaded.
LOWBIT_API void* current_stream(Device device);
LOWBIT_API void ask_for_streams(void* (*keeper)(Device device));

// Device memory for the work of one call, from torch's allocator. It is freed while that work may still run, and reused
// only by later work on the same stream.
class LOWBIT_API Workspace {
 public:
  Workspace(std::string_view op, const Place& place, int64_t bytes);  // RuntimeError if memory runs out
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace();
  void* at(int64_t byte) const { return static_cast<char*>(data_) + byte; }

 private:
  void *memory_ = nullptr, *data_ = nullptr;
};

struct MemoryKeeper {
  void* (*take)(std::string_view op, Device device, int64_t bytes, void** data);  // returns the handle for give_back
  void (*give_back)(void* memory);
};
LOWBIT_API void ask_for_memory(const MemoryKeeper* keeper);

}  // namespace lowbit
