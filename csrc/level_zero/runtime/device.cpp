// SPDX-License-Identifier: Apache-2.0
#include "level_zero/runtime/device.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <vector>

#include "core/once.hpp"

namespace lowbit::level_zero {

namespace ze {
namespace {

Api functions_of(const Library& found) { return {LOWBIT_LEVEL_ZERO(LOWBIT_FUNCTION_FOUND)}; }

}  // namespace
}  // namespace ze

namespace {

constexpr int kMostDevices = 64;
constexpr uint32_t kIntel = 0x8086, kGpu = 1;

const Library& loader() {
  static std::atomic<const Library*> kept{nullptr};
  return made_once(kept, [] {
    return open_library({.names = "libze_loader.so.1",
                         .source = "Level Zero's loader comes with Intel's GPU driver (Debian: apt install libze1)",
                         .own = folders_of("LOWBIT_LEVEL_ZERO_PATH", ""), .packages = {}, .home = {}});
  });
}

std::string_view name_of(int result) {
  switch (static_cast<uint32_t>(result)) {
    case 0x70000001: return "ZE_RESULT_ERROR_DEVICE_LOST";
    case 0x70000002: return "ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY";
    case 0x70000003: return "ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY";
    case 0x70000004: return "ZE_RESULT_ERROR_MODULE_BUILD_FAILURE";
    case 0x70000005: return "ZE_RESULT_ERROR_MODULE_LINK_FAILURE";
    case 0x78000001: return "ZE_RESULT_ERROR_UNINITIALIZED";
    case 0x78000003: return "ZE_RESULT_ERROR_UNSUPPORTED_FEATURE";
    case 0x78000004: return "ZE_RESULT_ERROR_INVALID_ARGUMENT";
    case 0x78000011: return "ZE_RESULT_ERROR_INVALID_KERNEL_NAME";
    case 0x78000018: return "ZE_RESULT_ERROR_INVALID_MODULE_UNLINKED";
    default: return "an error of Level Zero";
  }
}

// dpas of Xe-HPC and of what came later is for sub-groups of 16, and those devices have no smaller ones. Among the
// others Arc and the Data Center GPU Flex (Xe-HPG, dg2) have it, for sub-groups of 8.
int lanes_of(const ze::DeviceProperties& device, const ze::ComputeProperties& compute) {
  if (device.vendor_id != kIntel) return 0;
  const uint32_t* sizes = compute.sub_group_sizes;
  if (std::find(sizes, sizes + compute.sub_group_size_count, 8u) == sizes + compute.sub_group_size_count) return 16;
  const uint32_t id = device.device_id;
  return (id >= 0x4f80 && id <= 0x4f8f) || (id >= 0x5690 && id <= 0x56cf) ? 8 : 0;
}

Gpu make_gpu(ze::Driver driver, ze::Device device) {
  Gpu gpu{.device = device};
  ze::DeviceProperties properties;
  ze::ComputeProperties compute;
  ensure(api().device_properties(device, &properties), "zeDeviceGetProperties");
  ensure(api().compute_properties(device, &compute), "zeDeviceGetComputeProperties");
  gpu.name = properties.name, gpu.dpas_lanes = lanes_of(properties, compute);
  const ze::ContextDesc context;
  ensure(api().make_context(driver, &context, &gpu.context), "zeContextCreate");
  const ze::QueueDesc queue{.mode = ze::kSynchronous};
  ensure(api().make_immediate_list(gpu.context, device, &queue, &gpu.list), "zeCommandListCreateImmediate");
  return gpu;
}

std::vector<Gpu> find_gpus() {
  uint32_t driver_count = 0;
  ensure(api().drivers(&driver_count, nullptr), "zeDriverGet");
  std::vector<ze::Driver> drivers(driver_count);
  ensure(api().drivers(&driver_count, drivers.data()), "zeDriverGet");
  std::vector<Gpu> gpus;
  for (ze::Driver driver : drivers) {
    uint32_t count = 0;
    ensure(api().devices(driver, &count, nullptr), "zeDeviceGet");
    std::vector<ze::Device> devices(count);
    ensure(api().devices(driver, &count, devices.data()), "zeDeviceGet");
    for (ze::Device device : devices) {
      ze::DeviceProperties properties;
      ensure(api().device_properties(device, &properties), "zeDeviceGetProperties");
      if (properties.type == kGpu) gpus.push_back(make_gpu(driver, device));
    }
  }
  return gpus;
}

std::size_t number_of(Device device) { return static_cast<std::size_t>(device.index); }

const std::vector<Gpu>& gpus() {
  static std::atomic<const std::vector<Gpu>*> kept{nullptr};
  return made_once(kept, find_gpus);
}

std::string reason_of(Device device) {
  try {
    const std::size_t count = gpus().size();
    return number_of(device) < count ? "" : concat("Level Zero has ", count, " GPUs");
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace

const ze::Api& api() {
  static std::atomic<const ze::Api*> kept{nullptr};
  return made_once(kept, [] {
    const ze::Api api = ze::functions_of(loader());
    ensure(api.init(0), "zeInit");
    return api;
  });
}

void ensure(int result, std::string_view what) {
  if (result == 0) [[likely]] return;
  std::ostringstream number;
  number << std::hex << static_cast<uint32_t>(result);
  throw Error(ErrorKind::runtime, concat(what, " failed: ", name_of(result), " (0x", number.str(), ")"));
}

const Gpu& gpu(Device device) {
  const std::string& reason = unavailable(device);
  check(reason.empty(), ErrorKind::runtime, "level_zero: ", reason);
  return gpus()[number_of(device)];
}

std::mutex& list_mutex(Device device) {
  static std::array<std::mutex, kMostDevices> mutexes;
  return mutexes[number_of(device) % kMostDevices];
}

const std::string& unavailable(Device device) {
  static std::array<std::atomic<const std::string*>, kMostDevices> kept{};
  return made_once(kept[number_of(device) % kMostDevices], [&] { return reason_of(device); });
}

int dpas_lanes(const Place& place) { return gpu(place.device).dpas_lanes; }

void copy_to_host(const Place& place, void* to, const void* from, std::size_t bytes) {
  const std::lock_guard lock(list_mutex(place.device));
  ensure(api().copy(gpu(place.device).list, to, from, bytes, nullptr, 0, nullptr), "zeCommandListAppendMemoryCopy");
}

bool is_emulated() {
  if (!std::getenv("LOWBIT_LEVEL_ZERO_PATH")) return false;
  return loader().handle && dlsym(loader().handle, "lowbit_emulates_level_zero");
}

}  // namespace lowbit::level_zero
