// SPDX-License-Identifier: Apache-2.0
// Python functions that only simulated devices have: injected faults, exact counts.
#include <pybind11/stl.h>

#include <algorithm>
#include <iterator>
#include <optional>

#include "bindings/register.hpp"
#include "sim/faults.hpp"
#include "sim/memory.hpp"

namespace lowbit {
namespace {

namespace py = pybind11;

sim::Fault fault_of(std::string_view name) {
  const auto* const found = std::find(std::begin(sim::kFaultNames), std::end(sim::kFaultNames), name);
  check(found != std::end(sim::kFaultNames), ErrorKind::value,
        "inject: fault must be memory, launch, lost or slow, got '", name, "'");
  return static_cast<sim::Fault>(found - std::begin(sim::kFaultNames));
}

}  // namespace

void register_simulated(py::module_& parent) {
  using py::arg;
  py::module_ m =
      parent.def_submodule("simulated", "Faults and launches of the simulated devices (lowbit.devices.simulated).");
  m.def("start", sim::start, arg("devices"), arg("bytes"),
        "Reserve address space for ``devices`` of ``bytes`` each; once per process.");
  m.def("device_count", sim::device_count, "Return how many devices run; 0 before start.");
  m.def(
      "launches",
      [](int device, std::optional<int64_t> stream) {
        return stream ? sim::launches(device, *stream) : sim::launches(device);
      },
      arg("device"), arg("stream"), "Return how many kernels and copies were launched, on one stream or on any.");
  m.def(
      "inject",
      [](int device, std::string_view fault, int64_t after, int64_t times, int64_t microseconds) {
        sim::inject(device, fault_of(fault), {.after = after, .times = times, .microseconds = microseconds});
      },
      arg("device"), arg("fault"), arg("after"), arg("times"), arg("microseconds"),
      "Let the next ``after`` allocations or launches go well and the ``times`` after them fail, or take longer.");
  m.def("recover", sim::recover, arg("device"), "Take back every fault of a device.");
}

}  // namespace lowbit
