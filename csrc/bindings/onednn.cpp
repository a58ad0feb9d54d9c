// SPDX-License-Identifier: Apache-2.0
// What Python asks of oneDNN itself; ops reach its rows as on any backend.
#include "bindings/register.hpp"
#include "onednn/matmul.hpp"

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
  py::module_ onednn = m.def_submodule("onednn", "The library of oneDNN, and what is kept of it.");
  onednn.def("facts", facts, "Open the library; return its path, its version and, if it is of no use, the reason.");
  onednn.def("kept_primitives", onednn::kept_primitives,
             "Return how many primitives this thread keeps; at most MOST_KEPT.");
  onednn.attr("MOST_KEPT") = onednn::kMostKept;
}

}  // namespace lowbit
