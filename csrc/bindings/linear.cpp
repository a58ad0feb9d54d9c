// SPDX-License-Identifier: Apache-2.0
#include "ops/linear.hpp"

#include <pybind11/stl.h>

#include <tuple>

#include "bindings/register.hpp"
#include "bindings/tensor_caster.hpp"
#include "ops/experts.hpp"
#include "ops/preferred_row.hpp"
#include "ops/route.hpp"

namespace lowbit {
namespace {

DType activation_dtype(std::string_view asker, std::string_view name) {
  for (DType candidate : {DType::float32, DType::bfloat16, DType::float16})
    if (name_of(candidate) == name) return candidate;
  throw Error(ErrorKind::value, concat(asker, ": dtype must be float32, bfloat16 or float16, got ", name));
}

LinearArgs call_of(std::string_view asker, int64_t m, int64_t n, int64_t k, int64_t format, int64_t group_size,
                   bool asymmetric, int64_t x_format_, std::string_view dtype, std::string_view device) {
  const WeightSpec spec = weight_spec(asker, n, k, format, group_size, asymmetric);
  LinearArgs args{.m = m, .weight_spec = spec, .x_format = x_format(x_format_, spec),
                  .dtype = activation_dtype(asker, dtype), .low_rank = {}};
  args.place.device.type = device_type(asker, device);
  return args;
}

py::list explain_linear(int64_t m, int64_t n, int64_t k, int64_t format, int64_t group_size, bool asymmetric,
                        int64_t x_format, std::string_view dtype, std::string_view device, int64_t preferred,
                        int64_t activation) {
  LinearArgs args = call_of("explain_linear", m, n, k, format, group_size, asymmetric, x_format, dtype, device);
  check(activation >= 0 && activation < static_cast<int64_t>(std::size(kActivationNames)), ErrorKind::value,
        "explain_linear: activation must be 0..", std::size(kActivationNames) - 1, ", got activation=", activation);
  args.activation = static_cast<Activation>(activation);
  py::list rows;
  for (const Choice& choice : explain(args, preferred)) {
    py::dict row;
    row["name"] = choice.name, row["chosen"] = choice.chosen, row["reason"] = choice.reason;
    rows.append(row);
  }
  return rows;
}

std::string select_linear(int64_t m, int64_t n, int64_t k, int64_t format, int64_t group_size, bool asymmetric,
                          int64_t x_format, std::string_view dtype, std::string_view device) {
  return std::string(
      select(call_of("select_linear", m, n, k, format, group_size, asymmetric, x_format, dtype, device)).row.name);
}

using WeightNumbers = std::tuple<int64_t, int64_t, int64_t, int64_t, bool, int64_t>;  // as an op takes them

std::string select_experts(const WeightNumbers& gate_up, const WeightNumbers& down, std::string_view dtype,
                           std::string_view device) {
  constexpr std::string_view kAsker = "select_experts";
  const auto weights = [&](const WeightNumbers& numbers) {
    const auto& [n, k, format, group_size, asymmetric, x_format_] = numbers;
    ExpertWeights result;
    result.spec = weight_spec(kAsker, n, k, format, group_size, asymmetric);
    result.x_format = x_format(x_format_, result.spec);
    return result;
  };
  ExpertsArgs args;
  args.gate_up = weights(gate_up), args.down = weights(down);
  args.x.dtype = activation_dtype(kAsker, dtype);
  args.place.device.type = device_type(kAsker, device);
  return std::string(select(args).row.name);
}

}  // namespace

void register_linear(py::module_& m) {
  using py::arg;
  m.attr("X_FORMATS") = numbered(kXFormatNames);
  m.attr("ACTIVATIONS") = numbered(kActivationNames);
  m.attr("SCORINGS") = numbered(kScoringNames);
  m.def("explain_linear", explain_linear, arg("m"), arg("n"), arg("k"), arg("format"), arg("group_size"),
        arg("asymmetric"), arg("x_format"), arg("dtype"), arg("device") = "cpu",
        arg("row") = 0, arg("activation") = 0,
        "Say which kernel row would serve a linear call of ``m`` rows that prefers ``row`` (a row_number, 0: none), "
        "and why each other one would not.");
  m.def("select_linear", select_linear, arg("m"), arg("n"), arg("k"), arg("format"), arg("group_size"),
        arg("asymmetric"), arg("x_format"), arg("dtype"), arg("device") = "cpu",
        "Name the row that would serve such a call; rows behind it are not asked.");
  m.def("select_experts", select_experts, arg("gate_up_args"), arg("down_args"), arg("dtype"), arg("device") = "cpu",
        "Name the row that would serve a call of experts with weights of these two.");
  m.def("row_number", number_of_row, arg("op"), arg("name"),
        "Return the number that a call prefers this row by; a ValueError lists the rows of the op.");
}

}  // namespace lowbit
