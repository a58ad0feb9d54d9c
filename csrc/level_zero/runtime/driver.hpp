// SPDX-License-Identifier: Apache-2.0
// The loader of Level Zero, its drivers and their GPUs. Nothing is linked: the loader is opened by the first call that
// needs it, never at import.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "core/library.hpp"
#include "core/place.hpp"
#include "level_zero/runtime/api.hpp"

namespace lowbit::level_zero {

// libze_loader.so.1: in a folder of LOWBIT_LEVEL_ZERO_PATH, loaded already, or on the system's search path.
LOWBIT_API const Library& loader();

struct Api { LOWBIT_LEVEL_ZERO(LOWBIT_FUNCTION_MEMBER) };
const Api& api();  // initialised; an Error if there is no loader, or no driver

// A GPU with what its calls need. Its list runs in order: each command sees the results of all earlier ones.
struct Gpu {
  std::string name, driver;  // driver: its version, for the cache
  DriverHandle driver_handle;
  Context context;
  DeviceHandle handle;
  CommandList list;
  Event done;
  std::mutex* mutex;  // guards the list and done
  int dpas_lanes;     // sub-group size for dpas; 0: unknown or none
  int64_t memory_bytes;
};

// Every GPU of every driver, in the loader's order; an Error if there is none.
const std::vector<Gpu>& gpus();
const Gpu& gpu(Device device);  // an Error if it does not exist
// Whether this process was forked from one that had opened a driver, whose GPUs it cannot use.
bool is_forked();
LOWBIT_API int device_count();  // 0 without a loader, a driver or a GPU

inline int dpas_lanes(const Place& place) { return gpu(place.device).dpas_lanes; }

// Why this GPU does not exist, or "".
const std::string& unavailable(Device device);

// Throws an Error with the action and the meaning of the result, unless it is success.
void ensure(Result result, std::string_view what);

// Waits until the device has finished all work so far.
LOWBIT_API void wait(Device device);

// Facts about the devices, for Python.
struct Facts {
  std::string path, reason;  // path of the loader; why there is no GPU
  std::vector<std::string> names;
};
LOWBIT_API Facts facts();

}  // namespace lowbit::level_zero
