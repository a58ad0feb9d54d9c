// SPDX-License-Identifier: Apache-2.0
// For every backend of the CPU that this machine can run there is <isa>_sim, with its rows as <row>_sim. The memory of
// the call's device is open while a row runs and at no other time: whatever of an op reads memory outside its row dies
// on this device. What a row needs beside its arguments is the CPU's scratch, which is memory of the host.
#include "sim/backend.hpp"

#include <deque>

#include "sim/memory.hpp"

namespace lowbit::sim {
namespace {

std::string cpu_fails;  // why no backend could be asked whether this machine runs it: LOWBIT_ISA is wrong

const std::string& unavailable(Device) {
  static const std::string none, not_enabled = "lowbit.devices.simulated.enable() has not been called";
  return device_count() == 0 ? not_enabled : cpu_fails.empty() ? none : cpu_fails;
}

bool runs_here(const Backend& backend) {
  try {
    return backend.unavailable({}).empty();
  } catch (const Error& error) {
    cpu_fails = error.what();
    return backend.name == "scalar";  // one stays, to say so
  }
}

void open_and_run(const Place& place, const std::function<void()>& row) {
  const Open open(place.device.index, place.stream);
  row();
}

std::string_view name_after(std::string_view name) {
  static std::deque<std::string> names;  // never moved
  return names.emplace_back(concat(name, "_sim"));
}

Backend simulated(const Backend& cpu) {
  Backend backend = cpu;
  backend.name = name_after(cpu.name), backend.device = DeviceType::simulated;
  backend.unavailable = unavailable, backend.guard = open_and_run;
#define LOWBIT_OP(op, Args) \
  for (Kernel<Args>& row : backend.op) row.name = name_after(row.name);
  LOWBIT_OPS(LOWBIT_OP)
#undef LOWBIT_OP
  return backend;
}

}  // namespace

std::span<const Backend* const> backends(std::span<const Backend* const> cpu) {
  static const std::deque<Backend> made = [&] {
    std::deque<Backend> made;
    for (const Backend* backend : cpu)
      if (runs_here(*backend)) made.push_back(simulated(*backend));
    return made;
  }();
  static const std::vector<const Backend*> all = [] {
    std::vector<const Backend*> all;
    for (const Backend& backend : made) all.push_back(&backend);
    return all;
  }();
  return all;
}

}  // namespace lowbit::sim
