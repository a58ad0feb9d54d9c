// SPDX-License-Identifier: Apache-2.0
// Checks thousands of entries of modules, once per token (python/lowbit/quant/unchanged.py). Python's map and dict.get
// take five times as many instructions, a sixth of a token of 30 layers.
#include "bindings/register.hpp"
#include "core/error.hpp"

namespace lowbit {

namespace py = pybind11;

namespace {

bool entries_are(const py::list& dicts, const py::list& keys, const py::list& values) {
  const std::size_t count = dicts.size();
  check(keys.size() == count && values.size() == count, ErrorKind::value, "entries_are: keys and values must be ",
        count, ", one for each of dicts, got ", keys.size(), " and ", values.size());
  for (std::size_t i = 0; i < count; i++) {
    const auto at = static_cast<Py_ssize_t>(i);
    PyObject* const dict = PyList_GET_ITEM(dicts.ptr(), at);
    PyObject* const key = PyList_GET_ITEM(keys.ptr(), at);
    check(PyDict_Check(dict) && PyUnicode_CheckExact(key), ErrorKind::type,  // ensures that no Python code runs here
          "entries_are: dicts must be dict and keys str, got ", Py_TYPE(dict)->tp_name, " and ", Py_TYPE(key)->tp_name);
    PyObject* const value = PyDict_GetItemWithError(dict, key);
    if ((value ? value : Py_None) != PyList_GET_ITEM(values.ptr(), at)) return false;
  }
  return true;
}

}  // namespace

void register_entries(py::module_& m) {
  m.def("entries_are", entries_are, py::arg("dicts"), py::arg("keys"), py::arg("values"),
        "Return whether each of dicts has, under the key at its index, that very value; None: absent.");
}

}  // namespace lowbit
