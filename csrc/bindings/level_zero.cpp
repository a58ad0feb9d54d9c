// SPDX-License-Identifier: Apache-2.0
// Python functions for Level Zero itself; ops reach their kernels as on any device.
#include <pybind11/stl.h>

#include "bindings/register.hpp"
#include "level_zero/runtime/driver.hpp"
#include "level_zero/runtime/memory.hpp"
#include "level_zero/runtime/modules.hpp"

namespace lowbit {
namespace {

namespace py = pybind11;

py::dict facts() {
  const level_zero::Facts found = level_zero::facts();
  py::dict facts;
  facts["path"] = found.path, facts["reason"] = found.reason, facts["names"] = found.names;
  return facts;
}

py::bytes module_of(const std::string& name) {
  const std::vector<uint32_t> words = level_zero::module_words(name);
  if (words.empty()) throw py::key_error("level_zero.module: there is none of the name '" + name + "'");
  return {reinterpret_cast<const char*>(words.data()), words.size() * sizeof(uint32_t)};
}

}  // namespace

void register_level_zero(py::module_& parent) {
  py::module_ m = parent.def_submodule("level_zero", "Intel GPUs by oneAPI Level Zero (lowbit.devices.level_zero).");
  m.def("facts", facts, "Open the loader; return its path, why there is no GPU (or ''), and the names of the GPUs.");
  m.def("start", level_zero::start,
        "Claim torch's place for the GPUs; RuntimeError if there is none, or another device has it.");
  m.def("modules", level_zero::module_names, "Names of the modules of SPIR-V in this library.");
  m.def("module", module_of, py::arg("name"),
        "A module as SPIR-V, its constants not specialised; KeyError if there is none.");
  m.def("modules_compiler", level_zero::modules_compiler, "What compiled them; '' in a build without modules.");
  m.def("modules_missing", level_zero::modules_missing, "Why this build has no modules; '' if it has them.");
}

}  // namespace lowbit
