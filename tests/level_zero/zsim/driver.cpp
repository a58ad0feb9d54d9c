// SPDX-License-Identifier: Apache-2.0
// zsim: a driver of Level Zero for tests, whose one GPU is the CPU, by OpenCL. The real loader takes it where
// ZE_ENABLE_ALT_DRIVERS names it. ZSIM_FAIL=memory|lost|build[:after] or zsim_fail() makes a call fail.
#include <level_zero/ze_ddi.h>

#include <chrono>
#include <cstring>
#include <string_view>
#include <utility>

#include "modules.hpp"

namespace zsim {
namespace {

_ze_driver_handle_t driver;
_ze_device_handle_t device;

uint64_t now() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

ze_result_t init(ze_init_flags_t) {
  if (!opencl()) return ZE_RESULT_ERROR_UNINITIALIZED;
  if (const char* wanted = std::getenv("ZSIM_FAIL")) {
    const std::string text = wanted;
    const std::size_t colon = text.find(':');
    fault = {text.substr(0, colon), colon == text.npos ? 0 : std::atoi(text.c_str() + colon + 1)};
  }
  return ZE_RESULT_SUCCESS;
}

template <class Handle>
ze_result_t list_one(Handle handle, uint32_t* count, Handle* to) {
  if (!count) return ZE_RESULT_ERROR_INVALID_NULL_POINTER;
  if (*count == 0 || !to) *count = 1;
  else to[0] = handle, *count = 1;
  return ZE_RESULT_SUCCESS;
}
ze_result_t get_drivers(uint32_t* count, ze_driver_handle_t* to) { return list_one(&driver, count, to); }
ze_result_t get_devices(ze_driver_handle_t, uint32_t* count, ze_device_handle_t* to) {
  return list_one(&device, count, to);
}
ze_result_t driver_version(ze_driver_handle_t, ze_api_version_t* to) {
  *to = ZE_API_VERSION_1_3;
  return ZE_RESULT_SUCCESS;
}
ze_result_t driver_properties(ze_driver_handle_t, ze_driver_properties_t* to) {
  to->driverVersion = 1;
  return ZE_RESULT_SUCCESS;
}
ze_result_t device_properties(ze_device_handle_t, ze_device_properties_t* to) {
  to->type = ZE_DEVICE_TYPE_GPU, to->vendorId = 0x8086, to->flags = 0;
  const char* id = std::getenv("ZSIM_DEVICE");  // its PCI id: whose rows are chosen
  to->deviceId = id ? static_cast<uint32_t>(std::strtoul(id, nullptr, 0)) : 0;
  to->maxMemAllocSize = uint64_t{1} << 34, to->numThreadsPerEU = 8, to->physicalEUSimdWidth = 16;
  to->numEUsPerSubslice = 1, to->numSubslicesPerSlice = 1, to->numSlices = 1;
  std::snprintf(to->name, sizeof to->name, "zsim");
  return ZE_RESULT_SUCCESS;
}
ze_result_t compute_properties(ze_device_handle_t, ze_device_compute_properties_t* to) {
  to->maxTotalGroupSize = to->maxGroupSizeX = to->maxGroupSizeY = to->maxGroupSizeZ = kMaxGroup;
  to->maxGroupCountX = to->maxGroupCountY = to->maxGroupCountZ = UINT32_MAX;
  to->maxSharedLocalMemory = 64 << 10;
  to->numSubGroupSizes = 0;
  const char* dpas = std::getenv("ZSIM_DPAS");
  for (uint32_t lanes = dpas && std::string_view(dpas) == "16" ? 16 : 8; lanes <= 32; lanes *= 2)
    to->subGroupSizes[to->numSubGroupSizes++] = lanes;
  return ZE_RESULT_SUCCESS;
}
// ze_intel_gpu.h, which Debian 12 has not got.
struct DotProducts {
  uint32_t kind;
  void* next;
  uint32_t flags;
};
ze_result_t module_properties(ze_device_handle_t, ze_device_module_properties_t* to) {
  to->spirvVersionSupported = ZE_MAKE_VERSION(1, 2);
  auto* const products = static_cast<DotProducts*>(to->pNext);
  const char* dpas = std::getenv("ZSIM_DPAS");  // lanes of a newer driver's dpas, 0: none; unset: an older driver
  if (dpas && products && products->kind == 0x00030013) products->flags = std::string_view(dpas) == "0" ? 1 : 3;
  return ZE_RESULT_SUCCESS;
}
ze_result_t device_memory(ze_device_handle_t, uint32_t* count, ze_device_memory_properties_t* to) {
  if (*count && to) to[0].flags = 0, to[0].totalSize = uint64_t{1} << 34;
  *count = 1;
  return ZE_RESULT_SUCCESS;
}
ze_result_t queue_groups(ze_device_handle_t, uint32_t* count, ze_command_queue_group_properties_t* to) {
  constexpr uint32_t kAll = ZE_COMMAND_QUEUE_GROUP_PROPERTY_FLAG_COMPUTE | ZE_COMMAND_QUEUE_GROUP_PROPERTY_FLAG_COPY;
  if (*count && to) to[0].flags = kAll, to[0].numQueues = 1;
  *count = 1;
  return ZE_RESULT_SUCCESS;
}

ze_result_t create_context(ze_driver_handle_t, const ze_context_desc_t*, ze_context_handle_t* to) {
  *to = new _ze_context_handle_t;
  return ZE_RESULT_SUCCESS;
}

ze_result_t allocate(std::size_t bytes, std::size_t alignment, void** to) {
  const std::lock_guard lock(everything);
  if (is_lost) return ZE_RESULT_ERROR_DEVICE_LOST;
  if (bytes == 0) return ZE_RESULT_ERROR_UNSUPPORTED_SIZE;
  if (fails("memory")) return ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY;
  const std::size_t unit = alignment < 64 ? 64 : alignment;
  *to = std::aligned_alloc(unit, (bytes + unit - 1) / unit * unit);
  if (!*to) return ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY;
  std::memset(*to, 0xff, bytes);  // nan: what is not written is seen
  memory[static_cast<const char*>(*to)] = bytes;
  return ZE_RESULT_SUCCESS;
}
ze_result_t allocate_shared(ze_context_handle_t, const ze_device_mem_alloc_desc_t*, const ze_host_mem_alloc_desc_t*,
                            std::size_t bytes, std::size_t alignment, ze_device_handle_t, void** to) {
  return allocate(bytes, alignment, to);
}
ze_result_t allocate_device(ze_context_handle_t, const ze_device_mem_alloc_desc_t*, std::size_t bytes,
                            std::size_t alignment, ze_device_handle_t, void** to) {
  return allocate(bytes, alignment, to);
}
ze_result_t allocate_host(ze_context_handle_t, const ze_host_mem_alloc_desc_t*, std::size_t bytes,
                          std::size_t alignment, void** to) {
  return allocate(bytes, alignment, to);
}
ze_result_t free_memory(ze_context_handle_t, void* p) {
  const std::lock_guard lock(everything);
  if (!memory.erase(static_cast<const char*>(p))) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
  std::free(p);
  return ZE_RESULT_SUCCESS;
}
ze_result_t memory_properties(ze_context_handle_t, const void* p, ze_memory_allocation_properties_t* to,
                              ze_device_handle_t* on) {
  const std::lock_guard lock(everything);
  to->type = is_live(p, 1) ? ZE_MEMORY_TYPE_SHARED : ZE_MEMORY_TYPE_UNKNOWN, to->id = 0, to->pageSize = 4096;
  if (on) *on = &device;
  return ZE_RESULT_SUCCESS;
}

ze_result_t create_immediate(ze_context_handle_t, ze_device_handle_t, const ze_command_queue_desc_t* description,
                             ze_command_list_handle_t* to) {
  *to = new _ze_command_list_handle_t{true, description->mode == ZE_COMMAND_QUEUE_MODE_SYNCHRONOUS};
  return ZE_RESULT_SUCCESS;
}
ze_result_t create_list(ze_context_handle_t, ze_device_handle_t, const ze_command_list_desc_t*,
                        ze_command_list_handle_t* to) {
  *to = new _ze_command_list_handle_t{false, false};
  return ZE_RESULT_SUCCESS;
}
ze_result_t close_list(ze_command_list_handle_t) { return ZE_RESULT_SUCCESS; }
ze_result_t reset_list(ze_command_list_handle_t list) {
  list->waiting.assign(1, {});
  return ZE_RESULT_SUCCESS;
}

ze_result_t nothing() { return ZE_RESULT_SUCCESS; }

// `work`, after the events `before`, and then `signal`.
ze_result_t append(ze_command_list_handle_t list, std::function<ze_result_t()> work, ze_event_handle_t signal,
                   uint32_t count, ze_event_handle_t* before) {
  const std::lock_guard lock(everything);
  if (is_lost) return ZE_RESULT_ERROR_DEVICE_LOST;
  if (signal) signal->list = list;
  std::vector<ze_event_handle_t> awaited(before, before + count);
  list->add([=] {
    if (is_lost) return ZE_RESULT_ERROR_DEVICE_LOST;
    for (ze_event_handle_t event : awaited)
      if (!event->is_signalled && event->list && event->list != list) event->list->run();
    const uint64_t start = now();
    const ze_result_t result = work();
    if (signal) signal->is_signalled = true, signal->start = start, signal->end = now();
    return result;
  });
  return ZE_RESULT_SUCCESS;
}

ze_result_t append_launch(ze_command_list_handle_t list, ze_kernel_handle_t kernel, const ze_group_count_t* groups,
                          ze_event_handle_t signal, uint32_t count, ze_event_handle_t* before) {
  if (fails("lost")) is_lost = true;
  return append(list, launch(kernel, *groups), signal, count, before);
}
ze_result_t append_copy(ze_command_list_handle_t list, void* to, const void* from, std::size_t bytes,
                        ze_event_handle_t signal, uint32_t count, ze_event_handle_t* before) {
  return append(list, [=] { return std::memcpy(to, from, bytes), ZE_RESULT_SUCCESS; }, signal, count, before);
}
ze_result_t append_fill(ze_command_list_handle_t list, void* to, const void* pattern, std::size_t pattern_bytes,
                        std::size_t bytes, ze_event_handle_t signal, uint32_t count, ze_event_handle_t* before) {
  const std::string text(static_cast<const char*>(pattern), pattern_bytes);
  return append(list, [=] {
    for (std::size_t i = 0; i < bytes; i++) static_cast<char*>(to)[i] = text[i % text.size()];
    return ZE_RESULT_SUCCESS;
  }, signal, count, before);
}
ze_result_t append_barrier(ze_command_list_handle_t list, ze_event_handle_t signal, uint32_t count,
                           ze_event_handle_t* before) {
  const std::lock_guard lock(everything);
  list->add_barrier();
  const ze_result_t result = append(list, nothing, signal, count, before);
  list->add_barrier();
  return result;
}
ze_result_t append_signal(ze_command_list_handle_t list, ze_event_handle_t event) {
  return append(list, nothing, event, 0, nullptr);
}
ze_result_t append_wait(ze_command_list_handle_t list, uint32_t count, ze_event_handle_t* events) {
  const ze_result_t result = append(list, nothing, nullptr, count, events);
  list->add_barrier();
  return result;
}

ze_result_t create_queue(ze_context_handle_t, ze_device_handle_t, const ze_command_queue_desc_t* description,
                         ze_command_queue_handle_t* to) {
  *to = new _ze_command_queue_handle_t{description->mode == ZE_COMMAND_QUEUE_MODE_SYNCHRONOUS, {}};
  return ZE_RESULT_SUCCESS;
}
ze_result_t synchronize_queue(ze_command_queue_handle_t queue, uint64_t) {
  const std::lock_guard lock(everything);
  ze_result_t result = ZE_RESULT_SUCCESS;
  for (ze_command_list_handle_t list : std::exchange(queue->given, {}))
    if (const ze_result_t failed = list->run()) result = failed;
  return result;
}
ze_result_t execute(ze_command_queue_handle_t queue, uint32_t count, ze_command_list_handle_t* lists,
                    ze_fence_handle_t) {
  queue->given.insert(queue->given.end(), lists, lists + count);
  return queue->is_synchronous ? synchronize_queue(queue, 0) : ZE_RESULT_SUCCESS;
}

ze_result_t create_pool(ze_context_handle_t, const ze_event_pool_desc_t* description, uint32_t, ze_device_handle_t*,
                        ze_event_pool_handle_t* to) {
  *to = new _ze_event_pool_handle_t{description->count};
  return ZE_RESULT_SUCCESS;
}
ze_result_t create_event(ze_event_pool_handle_t pool, const ze_event_desc_t* description, ze_event_handle_t* to) {
  if (description->index >= pool->count) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
  *to = new _ze_event_handle_t;
  return ZE_RESULT_SUCCESS;
}
ze_result_t wait_for_event(ze_event_handle_t event, uint64_t) {
  const std::lock_guard lock(everything);
  if (is_lost) return ZE_RESULT_ERROR_DEVICE_LOST;
  if (!event->is_signalled && event->list)
    if (const ze_result_t failed = event->list->run()) return failed;
  return event->is_signalled ? ZE_RESULT_SUCCESS : ZE_RESULT_NOT_READY;
}
ze_result_t query_event(ze_event_handle_t event) {
  return event->is_signalled ? ZE_RESULT_SUCCESS : ZE_RESULT_NOT_READY;
}
template <bool is_signalled>
ze_result_t set_event(ze_event_handle_t event) {
  event->is_signalled = is_signalled;
  return ZE_RESULT_SUCCESS;
}
ze_result_t timestamp(ze_event_handle_t event, ze_kernel_timestamp_result_t* to) {
  to->global = to->context = {event->start, event->end};
  return event->is_signalled ? ZE_RESULT_SUCCESS : ZE_RESULT_NOT_READY;
}

}  // namespace
}  // namespace zsim

#define ZSIM_TABLE(getter, table, ...)                                                                     \
  extern "C" __attribute__((visibility("default"))) ze_result_t getter(ze_api_version_t, table* to) {      \
    using namespace zsim;                                                                                  \
    __VA_ARGS__;                                                                                           \
    return ZE_RESULT_SUCCESS;                                                                              \
  }

ZSIM_TABLE(zeGetGlobalProcAddrTable, ze_global_dditable_t, to->pfnInit = init)
ZSIM_TABLE(zeGetDriverProcAddrTable, ze_driver_dditable_t, to->pfnGet = get_drivers,
           to->pfnGetApiVersion = driver_version, to->pfnGetProperties = driver_properties)
ZSIM_TABLE(zeGetDeviceProcAddrTable, ze_device_dditable_t, to->pfnGet = get_devices,
           to->pfnGetProperties = device_properties, to->pfnGetComputeProperties = compute_properties,
           to->pfnGetModuleProperties = module_properties, to->pfnGetCommandQueueGroupProperties = queue_groups,
           to->pfnGetMemoryProperties = device_memory)
ZSIM_TABLE(zeGetContextProcAddrTable, ze_context_dditable_t, to->pfnCreate = create_context,
           to->pfnDestroy = destroy)
ZSIM_TABLE(zeGetMemProcAddrTable, ze_mem_dditable_t, to->pfnAllocShared = allocate_shared,
           to->pfnAllocDevice = allocate_device, to->pfnAllocHost = allocate_host, to->pfnFree = free_memory,
           to->pfnGetAllocProperties = memory_properties)
ZSIM_TABLE(zeGetModuleProcAddrTable, ze_module_dditable_t, to->pfnCreate = create_module,
           to->pfnDestroy = destroy, to->pfnGetNativeBinary = native_binary)
ZSIM_TABLE(zeGetModuleBuildLogProcAddrTable, ze_module_build_log_dditable_t, to->pfnDestroy = destroy,
           to->pfnGetString = read_log)
ZSIM_TABLE(zeGetKernelProcAddrTable, ze_kernel_dditable_t, to->pfnCreate = create_kernel,
           to->pfnDestroy = destroy, to->pfnSetGroupSize = set_group_size,
           to->pfnSetArgumentValue = set_argument, to->pfnSetIndirectAccess = set_indirect_access,
           to->pfnGetProperties = kernel_properties)
ZSIM_TABLE(zeGetCommandListProcAddrTable, ze_command_list_dditable_t, to->pfnCreate = create_list,
           to->pfnCreateImmediate = create_immediate, to->pfnDestroy = destroy, to->pfnClose = close_list,
           to->pfnReset = reset_list, to->pfnAppendLaunchKernel = append_launch,
           to->pfnAppendMemoryCopy = append_copy, to->pfnAppendMemoryFill = append_fill,
           to->pfnAppendBarrier = append_barrier, to->pfnAppendSignalEvent = append_signal,
           to->pfnAppendWaitOnEvents = append_wait)
ZSIM_TABLE(zeGetCommandQueueProcAddrTable, ze_command_queue_dditable_t, to->pfnCreate = create_queue,
           to->pfnDestroy = destroy, to->pfnExecuteCommandLists = execute,
           to->pfnSynchronize = synchronize_queue)
ZSIM_TABLE(zeGetEventPoolProcAddrTable, ze_event_pool_dditable_t, to->pfnCreate = create_pool,
           to->pfnDestroy = destroy)
ZSIM_TABLE(zeGetEventProcAddrTable, ze_event_dditable_t, to->pfnCreate = create_event, to->pfnDestroy = destroy,
           to->pfnHostSynchronize = wait_for_event, to->pfnQueryStatus = query_event,
           to->pfnHostSignal = set_event<true>, to->pfnHostReset = set_event<false>,
           to->pfnQueryKernelTimestamp = timestamp)

extern "C" __attribute__((visibility("default"))) void zsim_fail(const char* kind, int after) {
  const std::lock_guard lock(zsim::everything);
  zsim::fault = {kind, after}, zsim::is_lost = false;
}
extern "C" __attribute__((visibility("default"))) long zsim_live_allocations() {
  const std::lock_guard lock(zsim::everything);
  return static_cast<long>(zsim::memory.size());
}
