// SPDX-License-Identifier: Apache-2.0
#include "level_zero/runtime/driver.hpp"

#include <algorithm>
#include <array>
#include <cstdio>

#include "core/once.hpp"
#include "core/os.hpp"

namespace lowbit::level_zero {
namespace {

constexpr int kGpu = 1;
constexpr uint32_t kDpas = 2;
constexpr uint64_t kForEver = UINT64_MAX;

// A driver's threads and queues belong to the process that opened it; a forked child would wait for them forever.
std::atomic<bool> opened_by_parent{false};

std::string meaning(Result result) {
  switch (result) {
    case kDeviceLost: return "the device is lost: nothing can run on it until this process ends";
    case kOutOfHostMemory: return "no memory of the host is left";
    case kOutOfDeviceMemory: return "no memory of the device is left";
    case kModuleBuildFailure: return "the driver could not build the module";
    case kUninitialized: return "there is no driver";
    case kNoSuchKernel: return "the module has no kernel of that name";
    case kUnresolved: return "the module lacks a function that it calls";
  }
  return "an error of Level Zero";
}

Api open_api() {
  const Library& found = loader();
  const Api opened{LOWBIT_LEVEL_ZERO(LOWBIT_FUNCTION_FOUND)};
  const Result failed = opened.init(0);
  check(failed != kUninitialized, ErrorKind::runtime, found.path, " found no driver of a GPU (zeInit: ",
        meaning(failed), "); Intel's is in the package intel-level-zero-gpu or intel-opencl-icd");
  ensure(failed, "zeInit");
  os::in_forked_child([] { opened_by_parent = true; });
  return opened;
}

template <class Handle, class Get>
std::vector<Handle> all_of(Get&& get, std::string_view what) {
  uint32_t count = 0;
  ensure(get(&count, static_cast<Handle*>(nullptr)), what);
  std::vector<Handle> all(count);
  if (count) ensure(get(&count, all.data()), what);
  return all;
}

// For drivers that do not report a device's dot products: PCI ids of devices with dpas.
int known_lanes(const DeviceProperties& of) {
  constexpr uint32_t kIntel = 0x8086;
  struct Range {
    uint32_t first, last;
    int lanes;
  };
  constexpr Range kKnown[] = {{0x5690, 0x56c2, 8},    // Xe-HPG: Arc A, Data Center GPU Flex
                              {0x7d51, 0x7d51, 8},    // Xe-LPG+: Arrow Lake-H
                              {0x0b69, 0x0b6e, 16},   // Xe-HPC: Data Center GPU Max
                              {0x0bd0, 0x0be5, 16},
                              {0x6420, 0x64b0, 16},   // Xe2: Lunar Lake
                              {0xe202, 0xe223, 16}};  // Xe2: Arc B
  for (const auto [first, last, lanes] : kKnown)
    if (of.vendor == kIntel && of.device >= first && of.device <= last) return lanes;
  return 0;
}

// dpas needs the narrowest sub-groups: 8 lanes on Xe-HPG, 16 from Xe-HPC on.
int lanes_of(DeviceHandle device, const DeviceProperties& of) {
  DotProducts products;
  ModuleProperties modules;
  modules.header.next = &products;
  ensure(api().module_properties(device, &modules), "zeDeviceGetModuleProperties");
  if (products.flags == 0) return known_lanes(of);
  if (!(products.flags & kDpas)) return 0;
  ComputeProperties compute;
  ensure(api().compute_properties(device, &compute), "zeDeviceGetComputeProperties");
  const uint32_t narrowest = *std::min_element(compute.sub_group_sizes, compute.sub_group_sizes + compute.sub_groups);
  return narrowest == 8 || narrowest == 16 ? static_cast<int>(narrowest) : 0;
}

int64_t memory_of(DeviceHandle device) {
  uint32_t count = 0;
  ensure(api().memory_properties(device, &count, nullptr), "zeDeviceGetMemoryProperties");
  std::vector<DeviceMemoryProperties> kinds(count);
  if (count) ensure(api().memory_properties(device, &count, kinds.data()), "zeDeviceGetMemoryProperties");
  int64_t bytes = 0;
  for (const DeviceMemoryProperties& kind : kinds) bytes += static_cast<int64_t>(kind.bytes);
  return bytes;
}

Gpu make_gpu(DriverHandle driver, Context context, DeviceHandle handle, const DeviceProperties& of,
             uint32_t version) {
  Gpu made{of.name, concat(version, "-", of.vendor, "-", of.device), driver, context, handle, nullptr, nullptr,
           new std::mutex, lanes_of(handle, of), memory_of(handle)};
  const QueueDescription queue{};
  ensure(api().create_list(context, handle, &queue, &made.list), "zeCommandListCreateImmediate");
  const EventPoolDescription pool_of{};
  EventPool pool = nullptr;
  ensure(api().create_event_pool(context, &pool_of, 1, &handle, &pool), "zeEventPoolCreate");
  const EventDescription event_of{};
  ensure(api().create_event(pool, &event_of, &made.done), "zeEventCreate");
  return made;
}

// Contexts, lists and events are kept until the process ends.
std::vector<Gpu> find_gpus() {
  std::vector<Gpu> found;
  for (DriverHandle driver : all_of<DriverHandle>(api().drivers, "zeDriverGet")) {
    DriverProperties of_driver;
    ensure(api().driver_properties(driver, &of_driver), "zeDriverGetProperties");
    Context context = nullptr;
    const auto devices = all_of<DeviceHandle>(
        [&](uint32_t* count, DeviceHandle* to) { return api().devices(driver, count, to); }, "zeDeviceGet");
    for (DeviceHandle device : devices) {
      DeviceProperties of;
      ensure(api().device_properties(device, &of), "zeDeviceGetProperties");
      if (of.type != kGpu) continue;
      const ContextDescription context_of{};
      if (!context) ensure(api().create_context(driver, &context_of, &context), "zeContextCreate");
      found.push_back(make_gpu(driver, context, device, of, of_driver.version));
    }
  }
  check(!found.empty(), ErrorKind::runtime, "Level Zero's drivers have no GPU");
  return found;
}

std::string reason_of(Device device) {
  try {
    gpu(device);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace

const Library& loader() {
  static std::atomic<const Library*> kept{nullptr};
  return made_once(kept, [] {
    return open_library({.names = "libze_loader.so.1", .source = "apt install libze1 (or level-zero)",
                         .own = folders_of("LOWBIT_LEVEL_ZERO_PATH", ""), .packages = {}, .home = {}});
  });
}

const Api& api() {
  static std::atomic<const Api*> kept{nullptr};
  return made_once(kept, open_api);
}

const std::vector<Gpu>& gpus() {
  static std::atomic<const std::vector<Gpu>*> kept{nullptr};
  return made_once(kept, find_gpus);
}

bool is_forked() { return opened_by_parent; }

const Gpu& gpu(Device device) {
  check(!opened_by_parent, ErrorKind::runtime, name_of(device), ": this process was forked from one that had opened ",
        "Level Zero, which does not survive that; start it by multiprocessing's method 'spawn', or before a GPU is ",
        "used");
  const auto count = static_cast<int>(gpus().size());
  check(device.index < count, ErrorKind::runtime, "there is no ", name_of(device), ", Level Zero has ", count, " GPUs");
  return gpus()[static_cast<std::size_t>(device.index)];
}

const std::string& unavailable(Device device) {
  static std::array<std::atomic<const std::string*>, 64> kept{};
  const int index = device.index < 64 ? device.index : 63;
  return made_once(kept[static_cast<std::size_t>(index)], [&] { return reason_of(device); });
}

int device_count() {
  return unavailable(Device{DeviceType::level_zero, 0}).empty() ? static_cast<int>(gpus().size()) : 0;
}

void ensure(Result result, std::string_view what) {
  if (result == 0) [[likely]] return;
  char code[16];
  std::snprintf(code, sizeof code, "0x%08x", static_cast<unsigned>(result));
  throw Error(ErrorKind::runtime, concat(what, " failed: ", meaning(result), " (", code, ")"));
}

void wait(Device device) {
  const Gpu& on = gpu(device);
  const std::lock_guard lock(*on.mutex);
  ensure(api().append_barrier(on.list, on.done, 0, nullptr), concat(name_of(device), ": zeCommandListAppendBarrier"));
  ensure(api().wait_for_event(on.done, kForEver), concat(name_of(device), ": waiting for its work"));
  ensure(api().reset_event(on.done), concat(name_of(device), ": zeEventHostReset"));
}

Facts facts() {
  Facts found{loader().path, unavailable(Device{DeviceType::level_zero, 0}), {}};
  if (found.reason.empty())
    for (const Gpu& one : gpus()) found.names.push_back(one.name);
  return found;
}

}  // namespace lowbit::level_zero
