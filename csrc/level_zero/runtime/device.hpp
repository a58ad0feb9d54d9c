// SPDX-License-Identifier: Apache-2.0
// The loader of Level Zero (libze_loader.so.1), opened when a device is first needed, and its devices. Launches are
// waited for: a queue is synchronous.
#pragma once

#include <mutex>
#include <string>
#include <string_view>

#include "core/place.hpp"
#include "level_zero/runtime/api.hpp"

namespace lowbit::level_zero {

const ze::Api& api();  // RuntimeError: there is no loader, or it does not start

// RuntimeError with the name of Level Zero's result, unless it is 0.
void ensure(int result, std::string_view what);

// An Intel GPU: the devices of all drivers in their order.
struct Gpu {
  ze::Device device = nullptr;
  ze::Context context = nullptr;
  ze::CommandList list = nullptr;  // one thread at a time appends to it
  std::string name = {};
  int dpas_lanes = 0;  // sub-groups whose matrices dpas multiplies; 0: the device has none
};
const Gpu& gpu(Device device);
std::mutex& list_mutex(Device device);

// Why there is no such device; "" if there is.
const std::string& unavailable(Device device);

int dpas_lanes(const Place& place);

// Waits until what was launched before is done.
void copy_to_host(const Place& place, void* to, const void* from, std::size_t bytes);

// Whether LOWBIT_LEVEL_ZERO_PATH leads to a driver that runs kernels on the host (tests/level_zero/zsim): these rows
// can serve memory of the host then.
bool is_emulated();

}  // namespace lowbit::level_zero
