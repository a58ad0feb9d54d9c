// SPDX-License-Identifier: Apache-2.0
// The checks of an op for a call without data, made by its fake kernel, and the numbers of kept programs.
#include <pybind11/stl.h>

#include "bindings/register.hpp"
#include "torch/kept_programs.hpp"
#include "torch/registration.hpp"

namespace lowbit {

namespace py = pybind11;

namespace {

torch::DescribedTensor described_tensor(py::handle given) {
  if (given.is_none()) return {};
  const auto [dtype, shape] = given.cast<std::pair<std::string, std::vector<int64_t>>>();
  return {.given = true, .dtype = torch::dtype_named(dtype), .shape = shape};
}

torch::DescribedList described_list(const py::list& given) {
  torch::DescribedList list;
  for (const py::handle item : given)
    if (py::isinstance<py::tuple>(item)) list.of_tensors.push_back(described_tensor(item));
    else list.integers.push_back(item.cast<int64_t>());
  return list;
}

torch::DescribedValue described(torch::Kind kind, py::handle given) {
  switch (kind) {
    case torch::Kind::list: return described_list(py::reinterpret_borrow<py::list>(given));
    case torch::Kind::integer: return given.cast<int64_t>();
    case torch::Kind::number: return given.cast<double>();
    case torch::Kind::boolean: return given.cast<bool>();
    default: return described_tensor(given);
  }
}

void check_call(std::string_view name, const py::list& arguments) {
  const torch::RegisteredOp& op = torch::registered_op(name);
  check(arguments.size() == op.arguments.size(), ErrorKind::value, "check_call: arguments must be the ",
        op.arguments.size(), " of ", op.schema, ", got ", arguments.size());
  std::vector<torch::DescribedValue> values;
  for (std::size_t i = 0; i < op.arguments.size(); i++)
    values.push_back(described(op.arguments[i].kind, arguments[i]));
  op.check(values);
}

}  // namespace

void register_traced(py::module_& m) {
  m.def("check_call", check_call, py::arg("op"), py::arg("arguments"),
        R"(Raise what ``lowbit::op`` would raise of a call, before it computes.

Args:
    op: a name of ``register_torch``, without "lowbit::".
    arguments: in the order of the schema; a tensor is ``(dtype, shape)``, as ``("float32", [3, 64])``, or None.)");
  m.def("new_program_number", torch::new_program_number, "Return a number under which run_program keeps a program.");
  m.def("forget_program", torch::forget_program, py::arg("number"), "Free what run_program keeps under the number.");
}

}  // namespace lowbit
