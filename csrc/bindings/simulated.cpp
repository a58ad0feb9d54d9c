// SPDX-License-Identifier: Apache-2.0
// The simulated devices for Python: memory as DLPack capsules of device type 12, which torch takes as PrivateUse1
// tensors; runs; faults.
#include <pybind11/stl.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <optional>

#include "bindings/dlpack_capsule.hpp"
#include "bindings/register.hpp"
#include "sim/faults.hpp"
#include "sim/memory.hpp"

namespace lowbit {
namespace {

namespace py = pybind11;

int64_t bytes_of(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides, int bits) {
  int64_t elements = 1;
  for (std::size_t i = 0; i < shape.size(); i++) {
    if (shape[i] == 0) return 0;
    elements += (shape[i] - 1) * strides[i];
  }
  return elements * bits / 8;
}

py::capsule empty(int device, std::vector<int64_t> shape, std::vector<int64_t> strides, int code, int bits) {
  check(shape.size() == strides.size(), ErrorKind::value, "lowbit_sim: strides must have ", shape.size(),
        " entries, got ", strides.size());
  const int64_t bytes = bytes_of(shape, strides, bits);
  void* const data = sim::allocate(device, static_cast<std::size_t>(bytes));
  if (!data && bytes > 0) {
    const sim::Usage usage = sim::usage(device);
    PyErr_SetString(PyExc_MemoryError, concat("lowbit_sim:", device, ": out of memory: tried to allocate ", bytes,
                                              " bytes; ", usage.live_bytes, " of ", usage.capacity, " bytes are in use")
                                           .c_str());
    throw py::error_already_set();
  }
  return offer(data, {dlpack::kExtDev, device}, std::move(shape), std::move(strides), {code, bits}, sim::deallocate);
}

py::capsule host_view(uintptr_t address, std::vector<int64_t> shape, std::vector<int64_t> strides, int code, int bits) {
  return offer(reinterpret_cast<void*>(address), {dlpack::kCpu, 0}, std::move(shape), std::move(strides), {code, bits});
}

sim::Fault fault_of(std::string_view name) {
  const auto* const found = std::find(std::begin(sim::kFaultNames), std::end(sim::kFaultNames), name);
  check(found != std::end(sim::kFaultNames), ErrorKind::value,
        "inject: fault must be memory, launch, lost or slow, got '", name, "'");
  return static_cast<sim::Fault>(found - std::begin(sim::kFaultNames));
}

py::dict usage(int device) {
  const sim::Usage usage = sim::usage(device);
  py::dict result;
  result["live_bytes"] = usage.live_bytes, result["peak_bytes"] = usage.peak_bytes,
  result["live_blocks"] = usage.live_blocks;
  result["blocks"] = usage.blocks, result["capacity"] = usage.capacity;
  return result;
}

// What the part that is built against libc10 calls.
py::tuple functions() {
  const auto address = [](auto* function) { return reinterpret_cast<uintptr_t>(function); };
  return py::make_tuple(address(&lowbit_sim_allocate), address(&lowbit_sim_deallocate), address(&lowbit_sim_copy),
                        address(&lowbit_sim_usage), address(&lowbit_sim_reset_peak));
}

}  // namespace

void register_simulated(py::module_& parent) {
  using py::arg;
  py::module_ m =
      parent.def_submodule("simulated", "Memory, runs and faults of the simulated devices (lowbit.devices.simulated).");
  m.def("start", sim::start, arg("devices"), arg("bytes"),
        "Reserve address space for ``devices`` of ``bytes`` each; once per process.");
  m.def("device_count", sim::device_count, "Return how many devices run; 0 before start.");
  m.def("empty", empty, arg("device"), arg("shape"), arg("strides"), arg("code"), arg("bits"),
        "Return a DLPack capsule of new device memory, not zeroed; MemoryError where there is no room.");
  m.def("host_view", host_view, arg("address"), arg("shape"), arg("strides"), arg("code"), arg("bits"),
        "Return a DLPack capsule of a CPU tensor over device memory; it owns nothing, and may be read and written "
        "inside a run only.");
  py::class_<sim::Open>(
      m, "Open",
      "Keeps the memory of a device readable until it is deleted; the outermost one of a thread is a launch.")
      .def(py::init([](int device, int64_t stream) {
             return std::make_unique<sim::Open>(device, reinterpret_cast<void*>(stream));
           }),
           arg("device"), arg("stream"));
  m.def("usage", usage, arg("device"),
        "Return bytes and blocks in use, the peak, blocks allocated so far and the capacity.");
  m.def("reset_peak", sim::reset_peak, arg("device"), "Let the peak start again from what is in use.");
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
  m.def("functions", functions, "Return the addresses of what python/lowbit/devices/simulated/shim.cpp calls.");
}

}  // namespace lowbit
