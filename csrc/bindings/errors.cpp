// SPDX-License-Identifier: Apache-2.0
#include "bindings/register.hpp"
#include "core/error.hpp"

namespace lowbit {
namespace {

PyObject* python_type(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::value: return PyExc_ValueError;
    case ErrorKind::type: return PyExc_TypeError;
    case ErrorKind::index: return PyExc_IndexError;
    case ErrorKind::not_implemented: return PyExc_NotImplementedError;
    case ErrorKind::runtime: break;
  }
  return PyExc_RuntimeError;
}

}  // namespace

void register_errors() {
  pybind11::register_local_exception_translator([](std::exception_ptr exception) {
    try {
      if (exception) std::rethrow_exception(exception);
    } catch (const Error& error) {
      PyErr_SetString(python_type(error.kind), error.what());
    }
  });
}

}  // namespace lowbit
