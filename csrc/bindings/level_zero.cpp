// SPDX-License-Identifier: Apache-2.0
// What Python asks of Level Zero itself; ops reach their kernels as on any device.
#include <pybind11/stl.h>

#include "bindings/register.hpp"
#include "level_zero/runtime/driver.hpp"
#include "level_zero/runtime/memory.hpp"

namespace lowbit {
namespace {

namespace py = pybind11;

py::dict facts() {
  const level_zero::Facts found = level_zero::facts();
  py::dict facts;
  facts["path"] = found.path, facts["reason"] = found.reason, facts["names"] = found.names;
  return facts;
}

}  // namespace

void register_level_zero(py::module_& parent) {
  py::module_ m = parent.def_submodule("level_zero", "Intel GPUs by oneAPI Level Zero (lowbit.devices.level_zero).");
  m.def("facts", facts, "Open the loader; return its path, why there is no GPU (or ''), and the names of the GPUs.");
  m.def("start", level_zero::start,
        "Claim torch's place for the GPUs; RuntimeError if there is none, or another device has it.");
}

}  // namespace lowbit
