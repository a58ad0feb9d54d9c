// SPDX-License-Identifier: Apache-2.0
#include "level_zero/backend.hpp"

#include <deque>

#include "core/once.hpp"
#include "core/os.hpp"
#include "level_zero/runtime/driver.hpp"
#include "level_zero/runtime/modules.hpp"

namespace lowbit::level_zero {
namespace {

// Why rows cannot run there, or "".
const std::string& cannot_run(Device device) {
  const std::string& no_gpu = unavailable(device);
  return no_gpu.empty() ? modules_missing() : no_gpu;
}

// When a row's call returns, the device has finished: the host and torch's own queues read the results.
void run_and_wait(const Place& place, const std::function<void()>& row) {
  row();
  wait(place.device);
}

// c10::xpu::syncStreamsOnDevice: waits for torch's own queues of an xpu, which are SYCL's.
using WaitForTorch = void (*)(int8_t device);
WaitForTorch wait_for_torch() {
  void* const library = os::loaded_library(os::name_of_library("c10_xpu").c_str());
  return library ? reinterpret_cast<WaitForTorch>(os::find_symbol(library, "_ZN3c103xpu19syncStreamsOnDeviceEa")) : nullptr;
}

const std::string& no_xpu = *new std::string("this torch is not built for xpu, or has no syncStreamsOnDevice");

const std::string& cannot_run_for_torch(Device device) {
  return wait_for_torch() ? cannot_run(device) : no_xpu;
}

void run_between_waits(const Place& place, const std::function<void()>& row) {
  wait_for_torch()(static_cast<int8_t>(place.device.index));
  run_and_wait(place, row);
}

Backend make_backend() {
  Backend backend{.name = "level_zero", .device = DeviceType::level_zero, .unavailable = cannot_run,
                  .guard = run_and_wait};
  add_attention_rows(backend), add_decode_rows(backend), add_linear_rows(backend),
      add_optim_rows(backend), add_pack_rows(backend), add_quantize_rows(backend);
  return backend;
}

// The same rows for tensors on torch's own device, with other names.
Backend for_torch(const Backend& ours, std::deque<std::string>& names) {
  const auto named = [&](std::string_view name) { return std::string_view(names.emplace_back(concat(name, "_xpu"))); };
  Backend backend = ours;
  backend.name = named(ours.name), backend.device = DeviceType::xpu;
  backend.unavailable = cannot_run_for_torch, backend.guard = run_between_waits;
#define LOWBIT_OP(op, Args) \
  for (Kernel<Args>& row : backend.op) row.name = named(row.name);
  LOWBIT_OPS(LOWBIT_OP)
#undef LOWBIT_OP
  return backend;
}

// Backends, with the storage of their rows' names.
struct BackendList {
  std::deque<std::string> names;  // never moved
  std::deque<Backend> backends;
  std::vector<const Backend*> all;
};

}  // namespace

std::span<const Backend* const> backends() {
  static std::atomic<const BackendList*> kept{nullptr};
  return made_once(kept, [] {
    BackendList list;
    list.backends.push_back(make_backend());
    list.backends.push_back(for_torch(list.backends.front(), list.names));
    for (const Backend& backend : list.backends) list.all.push_back(&backend);
    return list;
  }).all;
}

}  // namespace lowbit::level_zero
