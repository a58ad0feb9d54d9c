// SPDX-License-Identifier: Apache-2.0
// Python functions for the device of ours that is torch's PrivateUse1 in this process (core/private_use.hpp): memory as
// DLPack capsules of device type 12, and functions for the module built against libc10.
#include <pybind11/stl.h>

#include "bindings/dlpack_capsule.hpp"
#include "bindings/register.hpp"
#include "core/private_use.hpp"

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
  const PrivateUse& ours = private_use();
  check(shape.size() == strides.size(), ErrorKind::value, name_of(ours.type), ": strides must have ", shape.size(),
        " entries, got ", strides.size());
  const int64_t bytes = bytes_of(shape, strides, bits);
  void* const data = ours.allocate(device, static_cast<std::size_t>(bytes));
  if (!data && bytes > 0) {
    const MemoryUsage usage = ours.usage(device);
    PyErr_SetString(PyExc_MemoryError, concat(name_of(ours.type), ":", device, ": out of memory: tried to allocate ",
                                              bytes, " bytes; ", usage.live_bytes, " of ", usage.capacity,
                                              " bytes are in use")
                                           .c_str());
    throw py::error_already_set();
  }
  return offer(data, {kPrivateUse, device}, std::move(shape), std::move(strides), {code, bits}, ours.deallocate);
}

py::capsule host_view(uintptr_t address, std::vector<int64_t> shape, std::vector<int64_t> strides, int code, int bits) {
  return offer(reinterpret_cast<void*>(address), {dlpack::kCpu, 0}, std::move(shape), std::move(strides), {code, bits});
}

class Run {
 public:
  Run(int device, int64_t stream) : device_(device) { private_use().open(device, reinterpret_cast<void*>(stream)); }
  ~Run() { private_use().close(device_); }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

 private:
  int device_;
};

py::dict usage(int device) {
  const MemoryUsage usage = private_use().usage(device);
  py::dict result;
  result["live_bytes"] = usage.live_bytes, result["peak_bytes"] = usage.peak_bytes,
  result["live_blocks"] = usage.live_blocks;
  result["blocks"] = usage.blocks, result["capacity"] = usage.capacity;
  return result;
}

// The functions called by the module built against libc10.
py::tuple functions() {
  const PrivateUse& ours = private_use();
  const auto address = [](auto* function) { return reinterpret_cast<uintptr_t>(function); };
  return py::make_tuple(address(ours.allocate), address(ours.deallocate), address(ours.copy), address(ours.usage),
                        address(ours.reset_peak));
}

}  // namespace

void register_private_use(py::module_& parent) {
  using py::arg;
  py::module_ m = parent.def_submodule("private_use", "Memory of the device of ours that torch has as PrivateUse1.");
  m.def("device_count", [] { return private_use().device_count(); }, "Return how many there are.");
  m.def("empty", empty, arg("device"), arg("shape"), arg("strides"), arg("code"), arg("bits"),
        "Return a DLPack capsule of new device memory, not zeroed; MemoryError where there is no room.");
  m.def("host_view", host_view, arg("address"), arg("shape"), arg("strides"), arg("code"), arg("bits"),
        "Return a DLPack capsule of a CPU tensor over device memory; it owns nothing, and may be read and written "
        "inside a run only.");
  py::class_<Run>(m, "Run", "Until it is deleted, the host may touch the memory of a device.")
      .def(py::init<int, int64_t>(), arg("device"), arg("stream"), py::call_guard<py::gil_scoped_release>());
  m.def("usage", usage, arg("device"),
        "Return bytes and blocks in use, the peak, blocks allocated so far and the capacity.");
  m.def("reset_peak", [](int device) { private_use().reset_peak(device); }, arg("device"),
        "Let the peak start again from the bytes in use.");
  m.def("functions", functions, "Return the addresses of functions for python/lowbit/devices/private_use/shim.cpp.");
}

}  // namespace lowbit
