// SPDX-License-Identifier: Apache-2.0
// The part of oneAPI Level Zero in use, declared here: the ABI is stable from 1.0 on, and the build has no headers of
// it. Names in comments are those of its specification.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lowbit::level_zero {

using Result = int;  // ze_result_t: 0 is success
inline constexpr Result kUninitialized = 0x78000001, kOutOfHostMemory = 0x70000002, kOutOfDeviceMemory = 0x70000003,
                        kDeviceLost = 0x70000001, kModuleBuildFailure = 0x70000004,
                        kUnsupportedSize = 0x78000009, kNoSuchKernel = 0x78000011, kUnresolved = 0x78000018;

using DriverHandle = struct DriverOfLoader*;
using DeviceHandle = struct DeviceOfLoader*;
using Context = struct ContextOfLoader*;
using Module = struct ModuleOfLoader*;
using BuildLog = struct BuildLogOfLoader*;
using KernelHandle = struct KernelOfLoader*;
using CommandList = struct CommandListOfLoader*;
using EventPool = struct EventPoolOfLoader*;
using Event = struct EventOfLoader*;

// Each struct begins with its number and a pointer to its extension.
enum class Kind : int {
  driver_properties = 0x1, device_properties = 0x3, compute_properties = 0x4, module_properties = 0x5,
  device_memory_properties = 0x7, context = 0xd, command_queue = 0xe, event_pool = 0x10, event = 0x11,
  device_memory = 0x15, host_memory = 0x16, module = 0x1b, kernel = 0x1d, kernel_properties = 0x1e,
  linked_modules = 0x00020002, dot_products = 0x00030013,
};
struct Header {
  Kind kind;
  const void* next = nullptr;
};

struct DriverProperties {
  Header header{Kind::driver_properties};
  uint8_t uuid[16] = {};
  uint32_t version = 0;
};
struct DeviceProperties {
  Header header{Kind::device_properties};
  int type = 0;  // 1: GPU
  uint32_t vendor = 0, device = 0, flags = 0, subdevice = 0, core_clock = 0;
  uint64_t max_bytes = 0;  // per allocation
  uint32_t hardware_contexts = 0, queue_priority = 0, threads_per_eu = 0, simd_width = 0, eus_per_subslice = 0,
           subslices_per_slice = 0, slices = 0;
  uint64_t timer_resolution = 0;
  uint32_t timestamp_bits = 0, kernel_timestamp_bits = 0;
  uint8_t uuid[16] = {};
  char name[256] = {};
};
struct ComputeProperties {
  Header header{Kind::compute_properties};
  uint32_t max_group = 0, max_group_xyz[3] = {}, max_groups_xyz[3] = {}, max_shared_bytes = 0, sub_groups = 0,
           sub_group_sizes[8] = {};
};
struct ModuleProperties {
  Header header{Kind::module_properties};
  uint32_t spirv_version = 0, flags = 0, fp16_flags = 0, fp32_flags = 0, fp64_flags = 0, max_argument_bytes = 0,
           printf_bytes = 0;
  uint8_t native_kernels[16] = {};
};
struct DotProducts {  // ze_intel_device_module_dp_exp_properties_t, after ModuleProperties: drivers from 24.05 on
  Header header{Kind::dot_products};
  uint32_t flags = 0;  // 1: dp4a, 2: dpas; older drivers write nothing
};
struct DeviceMemoryProperties {  // one kind of memory
  Header header{Kind::device_memory_properties};
  uint32_t flags = 0, clock = 0, bus_bits = 0;
  uint64_t bytes = 0;
  char name[256] = {};
};
struct KernelProperties {
  Header header{Kind::kernel_properties};
  uint32_t arguments = 0, group_size[3] = {}, sub_groups = 0, sub_group_size = 0, max_sub_group_size = 0,
           max_sub_groups = 0, local_bytes = 0, private_bytes = 0, spill_bytes = 0;
  uint8_t uuid[32] = {};
};
struct ContextDescription {
  Header header{Kind::context};
  uint32_t flags = 0;
};
struct QueueDescription {
  Header header{Kind::command_queue};
  uint32_t ordinal = 0, index = 0, flags = 0;
  int mode = 2, priority = 0;  // 2: asynchronous
};
struct EventPoolDescription {
  Header header{Kind::event_pool};
  uint32_t flags = 1, count = 1;  // 1: visible to the host
};
struct EventDescription {
  Header header{Kind::event};
  uint32_t index = 0, signal = 4, wait = 4;  // 4: scope of the host
};
struct DeviceMemoryDescription {
  Header header{Kind::device_memory};
  uint32_t flags = 0, ordinal = 0;
};
struct HostMemoryDescription {
  Header header{Kind::host_memory};
  uint32_t flags = 0;
};
enum class ModuleFormat : int { spirv = 0, native = 1 };
struct ModuleDescription {
  Header header{Kind::module};
  ModuleFormat format = ModuleFormat::spirv;
  std::size_t bytes = 0;
  const uint8_t* image = nullptr;
  const char* flags = nullptr;
  const void* constants = nullptr;
};
struct LinkedModules {  // ze_module_program_exp_desc_t, after a ModuleDescription
  Header header{Kind::linked_modules};
  uint32_t count = 0;
  const std::size_t* bytes = nullptr;
  const uint8_t** images = nullptr;
  const char** flags = nullptr;
  const void** constants = nullptr;
};
struct KernelDescription {
  Header header{Kind::kernel};
  uint32_t flags = 0;
  const char* name = nullptr;
};
struct GroupCount {
  uint32_t x = 1, y = 1, z = 1;
};
inline constexpr uint32_t kIndirectAccess = 1 | 2 | 4;  // host, device and shared memory

#define LOWBIT_LEVEL_ZERO(X)                                                                                         \
  X(init, "zeInit", uint32_t flags)                                                                                  \
  X(drivers, "zeDriverGet", uint32_t* count, DriverHandle* drivers)                                                  \
  X(driver_properties, "zeDriverGetProperties", DriverHandle driver, DriverProperties* properties)                   \
  X(devices, "zeDeviceGet", DriverHandle driver, uint32_t* count, DeviceHandle* devices)                             \
  X(device_properties, "zeDeviceGetProperties", DeviceHandle device, DeviceProperties* properties)                   \
  X(compute_properties, "zeDeviceGetComputeProperties", DeviceHandle device, ComputeProperties* properties)          \
  X(module_properties, "zeDeviceGetModuleProperties", DeviceHandle device, ModuleProperties* properties)             \
  X(memory_properties, "zeDeviceGetMemoryProperties", DeviceHandle device, uint32_t* count,                          \
    DeviceMemoryProperties* properties)                                                                              \
  X(create_context, "zeContextCreate", DriverHandle driver, const ContextDescription* description, Context* context) \
  X(allocate_shared, "zeMemAllocShared", Context context, const DeviceMemoryDescription* of_device,                  \
    const HostMemoryDescription* of_host, std::size_t bytes, std::size_t alignment, DeviceHandle device, void** p)   \
  X(free, "zeMemFree", Context context, void* p)                                                                     \
  X(create_module, "zeModuleCreate", Context context, DeviceHandle device, const ModuleDescription* description,     \
    Module* module, BuildLog* log)                                                                                   \
  X(destroy_module, "zeModuleDestroy", Module module)                                                                \
  X(read_log, "zeModuleBuildLogGetString", BuildLog log, std::size_t* bytes, char* text)                             \
  X(destroy_log, "zeModuleBuildLogDestroy", BuildLog log)                                                            \
  X(native_binary, "zeModuleGetNativeBinary", Module module, std::size_t* bytes, uint8_t* image)                     \
  X(create_kernel, "zeKernelCreate", Module module, const KernelDescription* description, KernelHandle* kernel)      \
  X(destroy_kernel, "zeKernelDestroy", KernelHandle kernel)                                                          \
  X(kernel_properties, "zeKernelGetProperties", KernelHandle kernel, KernelProperties* properties)                   \
  X(set_group_size, "zeKernelSetGroupSize", KernelHandle kernel, uint32_t x, uint32_t y, uint32_t z)                 \
  X(set_argument, "zeKernelSetArgumentValue", KernelHandle kernel, uint32_t index, std::size_t bytes,                \
    const void* value)                                                                                               \
  X(set_indirect_access, "zeKernelSetIndirectAccess", KernelHandle kernel, uint32_t flags)                           \
  X(create_list, "zeCommandListCreateImmediate", Context context, DeviceHandle device,                               \
    const QueueDescription* description, CommandList* list)                                                          \
  X(append_launch, "zeCommandListAppendLaunchKernel", CommandList list, KernelHandle kernel, const GroupCount* groups, \
    Event signal, uint32_t wait_count, Event* wait)                                                                  \
  X(append_copy, "zeCommandListAppendMemoryCopy", CommandList list, void* to, const void* from, std::size_t bytes,   \
    Event signal, uint32_t wait_count, Event* wait)                                                                  \
  X(append_barrier, "zeCommandListAppendBarrier", CommandList list, Event signal, uint32_t wait_count, Event* wait)  \
  X(create_event_pool, "zeEventPoolCreate", Context context, const EventPoolDescription* description,                \
    uint32_t device_count, DeviceHandle* devices, EventPool* pool)                                                   \
  X(create_event, "zeEventCreate", EventPool pool, const EventDescription* description, Event* event)                \
  X(wait_for_event, "zeEventHostSynchronize", Event event, uint64_t nanoseconds)                                     \
  X(reset_event, "zeEventHostReset", Event event)

}  // namespace lowbit::level_zero
