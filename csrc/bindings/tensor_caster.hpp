// SPDX-License-Identifier: Apache-2.0
// A Python argument as a TensorView: a torch tensor (by the DLPack C exchange API of its type, else, on the CPU, by its
// attributes) or any object with a buffer (numpy). Nothing is copied; the view is valid while the TensorArgument lives.
#pragma once

#include <pybind11/pybind11.h>

#include <deque>
#include <vector>

#include "core/tensor_view.hpp"

namespace lowbit {

namespace py = pybind11;

enum class Access { read, write };

class TensorArgument {
 public:
  // `what` names the argument in errors: "linear: x". If `optional`, None becomes an empty view.
  TensorArgument(py::handle object, const char* what, Access access = Access::read, bool optional = false);
  ~TensorArgument();
  TensorArgument(const TensorArgument&) = delete;
  TensorArgument& operator=(const TensorArgument&) = delete;

  const TensorView& operator*() const { return view_; }

 private:
  bool from_dlpack(py::handle object, const char* what);
  bool from_buffer(py::handle object, const char* what, Access access);
  bool from_attributes(py::handle object, const char* what);

  TensorView view_;
  Py_buffer buffer_{};
};

// A list of tensors; `optional` allows None among them.
class TensorArguments {
 public:
  TensorArguments(const py::iterable& objects, const char* what, Access access = Access::read, bool optional = false) {
    for (const py::handle object : objects) views.push_back(*arguments_.emplace_back(object, what, access, optional));
  }
  std::vector<TensorView> views;

 private:
  std::deque<TensorArgument> arguments_;  // never moved
};

inline TensorArgument output(py::handle object, const char* what) { return {object, what, Access::write}; }
inline TensorArgument optional(py::handle object, const char* what) { return {object, what, Access::read, true}; }

}  // namespace lowbit
