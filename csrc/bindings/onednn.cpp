// SPDX-License-Identifier: Apache-2.0
// Python functions for oneDNN itself; ops reach its rows as on any backend.
#include "bindings/register.hpp"
#include "onednn/runtime.hpp"

namespace lowbit {
namespace {

namespace py = pybind11;

py::dict facts() {
  const onednn::Facts& found = onednn::facts();
  py::dict facts;
  facts["path"] = found.path, facts["version"] = found.version, facts["reason"] = found.reason;
  return facts;
}

}  // namespace

void register_onednn(py::module_& m) {
  py::module_ onednn = m.def_submodule("onednn", "The library of oneDNN.");
  onednn.def("facts", facts, "Open the library; return its path, its version and, if it is of no use, the reason.");
}

}  // namespace lowbit
