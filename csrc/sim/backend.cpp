// SPDX-License-Identifier: Apache-2.0
// Each backend of the host that this machine can run (the CPU's, and CUDA's if emulated) has a twin <name>_sim, with
// its rows as <row>_sim. The memory of the call's device is accessible only while a row runs: an op that reads memory
// outside its row dies on this device. A row's scratch memory is host memory.
#include "sim/backend.hpp"

#include <deque>

#include "core/once.hpp"
#include "sim/memory.hpp"

namespace lowbit::sim {
namespace {

// Backends, with the storage of their names.
struct BackendList {
  std::string cpu_fails;          // why the CPU backends cannot be asked: LOWBIT_ISA is invalid
  std::deque<std::string> names;  // never moved
  std::deque<Backend> backends;
  std::vector<const Backend*> all;
  std::string not_enabled = "lowbit.devices.simulated.enable() has not been called";

  std::string_view name_after(std::string_view name) { return names.emplace_back(concat(name, "_sim")); }
};

std::atomic<const BackendList*> kept{nullptr};

const std::string& unavailable(Device) {
  const BackendList& list = *kept.load(std::memory_order_acquire);
  return device_count() == 0 ? list.not_enabled : list.cpu_fails;
}

bool runs_here(const Backend& backend, std::string& cpu_fails) {
  try {
    return backend.unavailable({}).empty();
  } catch (const Error& error) {
    cpu_fails = error.what();
    return backend.name == "scalar";  // one stays, to report it
  }
}

void open_and_run(const Place& place, const std::function<void()>& row) {
  const Open open(place.device.index, place.stream);
  row();
}

Backend simulated(const Backend& host, BackendList& list) {
  Backend backend = host;
  backend.name = list.name_after(host.name), backend.device = DeviceType::simulated;
  backend.unavailable = unavailable, backend.guard = open_and_run;
#define LOWBIT_OP(op, Args) \
  for (Kernel<Args>& row : backend.op) row.name = list.name_after(row.name);
  LOWBIT_OPS(LOWBIT_OP)
#undef LOWBIT_OP
  return backend;
}

}  // namespace

std::span<const Backend* const> backends(std::span<const Backend* const> host) {
  return made_once(kept, [&] {
    BackendList list;
    for (const Backend* backend : host)
      if (runs_here(*backend, list.cpu_fails)) list.backends.push_back(simulated(*backend, list));
    for (const Backend& backend : list.backends) list.all.push_back(&backend);
    return list;
  }).all;
}

}  // namespace lowbit::sim
