// SPDX-License-Identifier: Apache-2.0
// What we use of oneAPI Level Zero, declared by us: nothing of it is needed to build. Its names are those of ze_api.h
// without ze_ and _t.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/library.hpp"

namespace lowbit::level_zero::ze {

struct DriverObject;
struct DeviceObject;
struct ContextObject;
struct CommandListObject;
struct ModuleObject;
struct BuildLogObject;
struct KernelObject;
struct EventObject;
using Driver = DriverObject*;
using Device = DeviceObject*;
using Context = ContextObject*;
using CommandList = CommandListObject*;
using Module = ModuleObject*;
using BuildLog = BuildLogObject*;
using Kernel = KernelObject*;
using Event = EventObject*;

inline constexpr uint32_t kDeviceProperties = 0x3, kComputeProperties = 0x4, kContextDesc = 0xd, kQueueDesc = 0xe,
                          kModuleDesc = 0x1b, kKernelDesc = 0x1d, kModuleProgramDesc = 0x20002;

struct DeviceProperties {
  uint32_t stype = kDeviceProperties;
  void* next = nullptr;
  uint32_t type = 0, vendor_id = 0, device_id = 0, flags = 0, subdevice_id = 0, core_clock_rate = 0;
  uint64_t max_allocation = 0;
  uint32_t max_contexts = 0, max_priority = 0, threads_per_eu = 0, simd_width = 0, eus_per_subslice = 0,
           subslices_per_slice = 0, slices = 0;
  uint64_t timer_resolution = 0;
  uint32_t timestamp_bits = 0, kernel_timestamp_bits = 0;
  uint8_t uuid[16] = {};
  char name[256] = {};
};

struct ComputeProperties {
  uint32_t stype = kComputeProperties;
  void* next = nullptr;
  uint32_t max_group_size = 0, max_group_size_each[3] = {}, max_group_count[3] = {}, max_local_memory = 0,
           sub_group_size_count = 0, sub_group_sizes[8] = {};
};

struct ContextDesc {
  uint32_t stype = kContextDesc;
  const void* next = nullptr;
  uint32_t flags = 0;
};

struct QueueDesc {
  uint32_t stype = kQueueDesc;
  const void* next = nullptr;
  uint32_t ordinal = 0, index = 0, flags = 0, mode = 0, priority = 0;
};
inline constexpr uint32_t kSynchronous = 1;  // mode

struct ModuleDesc {
  uint32_t stype = kModuleDesc;
  const void* next = nullptr;
  uint32_t format = 0;  // SPIR-V
  std::size_t bytes = 0;
  const uint8_t* module = nullptr;
  const char* build_flags = nullptr;
  const void* constants = nullptr;
};

// Several modules, which are linked: behind a ModuleDesc.
struct ModuleProgramDesc {
  uint32_t stype = kModuleProgramDesc;
  const void* next = nullptr;
  uint32_t count = 0;
  const std::size_t* bytes = nullptr;
  const uint8_t** modules = nullptr;
  const char** build_flags = nullptr;
  const void** constants = nullptr;
};

struct KernelDesc {
  uint32_t stype = kKernelDesc;
  const void* next = nullptr;
  uint32_t flags = 0;
  const char* name = nullptr;
};
inline constexpr uint32_t kIndirectHost = 1, kIndirectDevice = 2, kIndirectShared = 4;

struct GroupCount {
  uint32_t x, y, z;
};

#define LOWBIT_LEVEL_ZERO(X)                                                                                   \
  X(init, "zeInit", uint32_t flags)                                                                            \
  X(drivers, "zeDriverGet", uint32_t* count, Driver* drivers)                                                  \
  X(devices, "zeDeviceGet", Driver driver, uint32_t* count, Device* devices)                                   \
  X(device_properties, "zeDeviceGetProperties", Device device, DeviceProperties* properties)                   \
  X(compute_properties, "zeDeviceGetComputeProperties", Device device, ComputeProperties* properties)          \
  X(make_context, "zeContextCreate", Driver driver, const ContextDesc* desc, Context* context)                 \
  X(make_immediate_list, "zeCommandListCreateImmediate", Context context, Device device, const QueueDesc* desc, \
    CommandList* list)                                                                                         \
  X(make_module, "zeModuleCreate", Context context, Device device, const ModuleDesc* desc, Module* module,     \
    BuildLog* log)                                                                                             \
  X(log_text, "zeModuleBuildLogGetString", BuildLog log, std::size_t* bytes, char* text)                       \
  X(destroy_log, "zeModuleBuildLogDestroy", BuildLog log)                                                      \
  X(make_kernel, "zeKernelCreate", Module module, const KernelDesc* desc, Kernel* kernel)                      \
  X(set_group_size, "zeKernelSetGroupSize", Kernel kernel, uint32_t x, uint32_t y, uint32_t z)                 \
  X(set_argument, "zeKernelSetArgumentValue", Kernel kernel, uint32_t index, std::size_t bytes, const void* value) \
  X(set_indirect_access, "zeKernelSetIndirectAccess", Kernel kernel, uint32_t flags)                           \
  X(launch, "zeCommandListAppendLaunchKernel", CommandList list, Kernel kernel, const GroupCount* groups,      \
    Event signal, uint32_t wait_count, Event* waits)                                                           \
  X(copy, "zeCommandListAppendMemoryCopy", CommandList list, void* to, const void* from, std::size_t bytes,    \
    Event signal, uint32_t wait_count, Event* waits)

struct Api {
  LOWBIT_LEVEL_ZERO(LOWBIT_FUNCTION_MEMBER)
};

}  // namespace lowbit::level_zero::ze
