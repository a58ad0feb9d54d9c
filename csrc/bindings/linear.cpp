// SPDX-License-Identifier: Apache-2.0
#include "ops/linear.hpp"

#include <pybind11/stl.h>

#include "bindings/register.hpp"
#include "bindings/tensor_caster.hpp"

namespace lowbit {
namespace {

void linear_into(py::handle x, py::handle weight, py::handle out, int64_t n, int64_t k, int64_t format, int64_t group_size,
                 bool asymmetric, int64_t x_format, py::handle bias, int64_t activation, py::handle mul, py::handle add) {
  const TensorArgument x_argument(x, "linear: x"), weight_argument(weight, "linear: weight");
  const TensorArgument y_argument = output(out, "linear: out");
  const TensorArgument bias_argument = optional(bias, "linear: bias"), mul_argument = optional(mul, "linear: mul");
  const TensorArgument add_argument = optional(add, "linear: add");
  const LinearTensors tensors{.x = *x_argument, .weight = *weight_argument, .bias = *bias_argument, .mul = *mul_argument,
                              .add = *add_argument, .y = *y_argument};
  const py::gil_scoped_release nogil;
  const WeightSpec spec = weight_spec("linear", n, k, format, group_size, asymmetric);
  linear(tensors, spec, x_format, activation);
}

py::list explain_linear(int64_t m, int64_t n, int64_t k, int64_t format, int64_t group_size, bool asymmetric, int64_t x_format_,
                        std::string_view dtype) {
  const WeightSpec spec = weight_spec("explain_linear", n, k, format, group_size, asymmetric);
  LinearArgs args{.m = m, .weight_spec = spec, .x_format = x_format(x_format_, spec), .dtype = DType::other};
  for (DType candidate : {DType::float32, DType::bfloat16, DType::float16})
    if (name_of(candidate) == dtype) args.dtype = candidate;
  check(args.dtype != DType::other, ErrorKind::value, "explain_linear: dtype must be float32, bfloat16 or float16, got ", dtype);
  py::list rows;
  for (const Choice& choice : explain(args)) {
    py::dict row;
    row["name"] = choice.name, row["chosen"] = choice.chosen, row["reason"] = choice.reason;
    rows.append(row);
  }
  return rows;
}

}  // namespace

void register_linear(py::module_& m) {
  using py::arg;
  m.def("linear", linear_into, arg("x"), arg("weight"), arg("out"), arg("n"), arg("k"), arg("format"), arg("group_size"), arg("asymmetric"),
        arg("x_format"), arg("bias") = py::none(), arg("activation") = 0, arg("mul") = py::none(), arg("add") = py::none(),
        R"(Write act(x @ w.T + bias) * mul + add into ``out``.

Args:
    x: activations ``[..., k]``, float32, bfloat16 or float16, contiguous.
    weight: packed weight, uint8 ``[panels, panel_bytes]``.
    out: result ``[..., n]``, dtype of ``x``, contiguous.
    n, k: columns of the result and of ``x``: the weight's own, which its packed shape alone does not tell.
    format, group_size, asymmetric: what the packed weight holds (``FORMATS``; group 0 is per channel).
    x_format: how activations are taken (``X_FORMATS``).
    bias: ``[n]`` in any of the three dtypes, or None.
    activation: ``ACTIVATIONS``.
    mul, add: dtype and shape of ``out``, or None.

Raises:
    RuntimeError: the last dimension of ``x`` is not ``k``, as in torch.nn.functional.linear.
    ValueError, TypeError: another argument does not fit; the text names it.
    NotImplementedError: no kernel row fits, or not the forced one.)");
  m.def("explain_linear", explain_linear, arg("m"), arg("n"), arg("k"), arg("format"), arg("group_size"), arg("asymmetric"),
        arg("x_format"), arg("dtype"),
        "Say which kernel row would serve a linear call of ``m`` rows, and why each other one would not.");
}

}  // namespace lowbit
