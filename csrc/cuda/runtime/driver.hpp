// SPDX-License-Identifier: Apache-2.0
// The functions of libcuda in use, with our own types: the ABI is stable, and the build has no CUDA headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/error.hpp"
#include "core/place.hpp"
#include "cuda/runtime/libraries.hpp"

namespace lowbit::cuda {

using Result = int;  // CUresult: 0 is success
using DeviceOrdinal = int;
using Context = struct ContextOfDriver*;
using Module = struct LibraryOfDriver*;
using KernelHandle = struct KernelOfDriver*;
using Function = struct FunctionOfDriver*;
using Stream = void*;

enum DeviceAttribute { kMultiprocessors = 16, kComputeMajor = 75, kComputeMinor = 76 };
enum FunctionAttribute { kMaxSharedBytes = 8 };
struct LaunchAttribute {  // CUlaunchAttribute
  int id;
  alignas(8) int value[16];
};
inline constexpr LaunchAttribute kBeginsEarly{6, {1}};  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
struct Launch {                                         // CUlaunchConfig
  unsigned grid[3], block[3], shared_bytes;
  Stream stream;
  const LaunchAttribute* attributes;
  unsigned count;  // number of attributes
};
inline constexpr int kOldestDriver = 12010;  // CUDA 12.1: kernel arguments of more than 4 KB

#define LOWBIT_CUDA_DRIVER(X)                                                                                       \
  X(init, "cuInit", unsigned flags)                                                                                 \
  X(version, "cuDriverGetVersion", int* version)                                                                    \
  X(device_count, "cuDeviceGetCount", int* count)                                                                   \
  X(device_get, "cuDeviceGet", DeviceOrdinal* device, int index)                                                    \
  X(device_attribute, "cuDeviceGetAttribute", int* value, int attribute, DeviceOrdinal device)                      \
  X(primary_context, "cuDevicePrimaryCtxRetain", Context* context, DeviceOrdinal device)                            \
  X(current_context, "cuCtxGetCurrent", Context* context)                                                           \
  X(push_context, "cuCtxPushCurrent_v2", Context context)                                                           \
  X(pop_context, "cuCtxPopCurrent_v2", Context* context)                                                            \
  X(load_module, "cuLibraryLoadData", Module* module, const void* image, void* jit, void** jit_values, unsigned, void* \
    options, void** option_values, unsigned)                                                                        \
  X(get_kernel, "cuLibraryGetKernel", KernelHandle* kernel, Module module, const char* name)                        \
  X(get_function, "cuKernelGetFunction", Function* function, KernelHandle kernel)                                   \
  X(set_attribute, "cuFuncSetAttribute", Function function, int attribute, int value)                               \
  X(is_capturing, "cuStreamIsCapturing", Stream stream, int* status)                                                \
  X(launch, "cuLaunchKernelEx", const Launch* launch, Function function, void** arguments, void** extra)            \
  X(copy_to_host, "cuMemcpyDtoHAsync_v2", void* to, uintptr_t from, std::size_t bytes, Stream stream)               \
  X(synchronize, "cuStreamSynchronize", Stream stream)                                                              \
  X(error_name, "cuGetErrorName", Result error, const char** name)                                                  \
  X(error_text, "cuGetErrorString", Result error, const char** text)

struct Driver { LOWBIT_CUDA_DRIVER(LOWBIT_FUNCTION_MEMBER) };

// Initialised by the first call; an Error if there is no driver, or it cannot be initialised.
const Driver& driver();

// Throws an Error with the action and the driver's text for the result, unless `result` is success.
void ensure(Result result, std::string_view what);
void ensure(Result result, Device device, std::string_view what);

// Why our kernels cannot run on this device, or "". Cached per device.
const std::string& unavailable(Device device);

int capability(Device device);  // 90: compute capability 9.0

// NVRTC's name of the architecture: "sm_90a".
std::string architecture(Device device);

int multiprocessors(Device device);

// Whether a kernel can start before its predecessors have ended; CUDA graphs support it from CUDA 12.3 on.
bool can_begin_early(Device device);

// Whether the stream is being captured in a CUDA graph: then nothing can be loaded, allocated or waited for.
bool is_captured(const Place& place);

// RAII: makes the device's primary context, torch's, the current one of this thread.
class InContext {
 public:
  explicit InContext(Device device);
  ~InContext();
  InContext(const InContext&) = delete;
  InContext& operator=(const InContext&) = delete;

 private:
  bool pushed_ = false;
};

}  // namespace lowbit::cuda
