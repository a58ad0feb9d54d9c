// SPDX-License-Identifier: Apache-2.0
#include "ops/optim.hpp"

#include <pybind11/stl.h>

#include <array>
#include <vector>

#include "bindings/register.hpp"
#include "bindings/tensor_caster.hpp"

namespace lowbit {
namespace {

using List = py::sequence;

List list_of(py::handle object, const char* what, std::size_t length) {
  check(py::isinstance<py::sequence>(object), ErrorKind::type, what, " must be a list");
  const auto list = py::reinterpret_borrow<List>(object);
  check(list.size() == length, ErrorKind::value, what, " must have ", length, " entries, got ", list.size());
  return list;
}

std::vector<List> lists_of(py::handle object, const char* what, int moments, std::size_t length) {
  std::vector<List> lists;
  for (const py::handle list : list_of(object, what, static_cast<std::size_t>(moments)))
    lists.push_back(list_of(list, what, length));
  return lists;
}

// A view of a tensor that the list keeps alive.
TensorView view_of(const List& list, std::size_t i, const char* what, Access access = Access::write) {
  return *TensorArgument(list[i], what, access);
}

Hyper hyper_of(const py::dict& values) {
  Hyper hyper;
  for (const auto& [name, value] : values) {
    const auto given = name.cast<std::string_view>();
#define LOWBIT_HYPER_FIELD(Type, field) \
  if (given == #field) hyper.field = value.cast<Type>(); else
    LOWBIT_HYPER(LOWBIT_HYPER_FIELD)
#undef LOWBIT_HYPER_FIELD
    throw Error(ErrorKind::value, concat("optim_step: hyper has an unknown name, got '", given, "'"));
  }
  return hyper;
}

py::object name_of(HyperField field) {
  return field == HyperField::none ? py::object(py::none()) : py::str(kHyperNames[static_cast<int>(field)]);
}

py::dict facts_of_rules() {
  py::dict rules;
  for (int i = 0; i < static_cast<int>(std::size(kRuleNames)); i++)
    with_rule(static_cast<Rule>(i), [&]<class Type>() {
      py::dict moments, rule;
      for (const Moment& moment : Type::moments)
        moments[py::str(moment.name)] = py::make_tuple(moment.is_signed, name_of(moment.needs));
      py::list reads;
      for (const HyperField field : Type::reads) reads.append(name_of(field));
      rule["number"] = i, rule["moments"] = moments, rule["reads"] = py::tuple(reads);
      rules[py::str(kRuleNames[i])] = rule;
    });
  return rules;
}

// Checks the whole step; the result refers to tensors of the lists.
OptimStep prepare(int64_t rule, int64_t state_format, int64_t block_size, py::handle params, py::handle grads,
                  py::handle states, py::handle scales, py::handle steps, const py::dict& hyper, py::handle grad_scale,
                  py::handle found_inf, std::optional<int64_t> seed, const py::object& corrections) {
  const TensorArgument scale = optional(grad_scale, "optim_step: grad_scale"),
                       inf = optional(found_inf, "optim_step: found_inf");
  OptimStep step(rule, state_format, block_size, hyper_of(hyper), *scale, *inf, seed);
  const std::size_t count = py::len(params);
  const List param_list = list_of(params, "optim_step: params", count);
  const List grad_list = list_of(grads, "optim_step: grads", count);
  const List step_list = list_of(steps, "optim_step: steps", count);
  const std::vector<List> moment_lists = lists_of(states, "optim_step: states", step.moments(), count);
  const std::vector<List> scale_lists =
      lists_of(scales, "optim_step: scales", step.has_scales() ? step.moments() : 0, count);
  const List correction_list = corrections.is_none() ? List(py::tuple())
                                                     : list_of(corrections, "optim_step: corrections", count);
  for (std::size_t i = 0; i < count; i++) {
    std::array<TensorView, kMaxMoments> moment, block_scale;
    for (std::size_t k = 0; k < moment_lists.size(); k++) moment[k] = view_of(moment_lists[k], i, "optim_step: states");
    for (std::size_t k = 0; k < scale_lists.size(); k++)
      block_scale[k] = view_of(scale_lists[k], i, "optim_step: scales");
    step.add(view_of(param_list, i, "optim_step: params"), view_of(grad_list, i, "optim_step: grads"),
             view_of(step_list, i, "optim_step: steps"), moment.data(), block_scale.data(),
             corrections.is_none() ? TensorView{} : view_of(correction_list, i, "optim_step: corrections"));
  }
  return step;
}

void take(OptimStep& step) {
  const py::gil_scoped_release nogil;
  step.run();
}

void encode_state_into(py::handle values, int64_t format, bool is_signed, int64_t block_size, py::handle codes,
                       py::handle scale) {
  const TensorArgument from(values, "encode_state: values"), to = output(codes, "encode_state: codes"),
                                                             scales = output(scale, "encode_state: scale");
  const py::gil_scoped_release nogil;
  encode_state({.format = state_format("encode_state", format, block_size),
                .is_signed = is_signed,
                .block_size = block_size,
                .values = *from,
                .codes = *to,
                .scale = *scales});
}

void decode_state_into(py::handle codes, py::handle scale, int64_t format, bool is_signed, int64_t block_size,
                       py::handle values) {
  const TensorArgument from(codes, "decode_state: codes"), scales(scale, "decode_state: scale"),
      to = output(values, "decode_state: values");
  const py::gil_scoped_release nogil;
  decode_state({.format = state_format("decode_state", format, block_size),
                .is_signed = is_signed,
                .block_size = block_size,
                .codes = *from,
                .scale = *scales,
                .values = *to});
}

}  // namespace

void register_optim(py::module_& m) {
  using py::arg;
  m.attr("OPTIM_RULES") = facts_of_rules();
  py::tuple hyper(std::size(kHyperNames));
  for (std::size_t i = 0; i < std::size(kHyperNames); i++) hyper[i] = kHyperNames[i];
  m.attr("OPTIM_HYPER") = hyper;
  m.attr("STATE_FORMATS") = numbered(kStateFormatNames);
  py::class_<OptimStep>(m, "OptimStep", R"(A step over lists of tensors, checked; ``run`` takes it, in place.

Args:
    rule, state_format: numbers of ``OPTIM_RULES``, ``STATE_FORMATS``.
    block_size: elements that share a scale, a power of two from 32 to 4096.
    params, grads: float32, bfloat16 or float16, dense in memory, a gradient in the order of its parameter.
    states: a list per moment that the rule keeps (``OPTIM_RULES``) of tensors per parameter: float32 or bfloat16
        values, or uint8 codes ([numel], 4-bit [ceil(numel / 2)]).
    scales: the same shape of lists, float32 ``[ceil(numel / block_size)]`` each; empty for float states.
    steps: one float32 each, counted up.
    hyper: numbers by their names in ``OPTIM_HYPER``; absent means 0.
    grad_scale: one float32: gradients are divided by it, and written back.
    found_inf: one float32: if not 0, nothing is done.
    seed: round bfloat16 parameters stochastically, by this seed, the step and the position in the list.
    corrections: int8 ``[numel]`` for each parameter, all bfloat16: a parameter and its correction are the leading 24
        bits of a float32. None: no corrections.

The lists are kept, and must not change before ``run``.)")
      .def(py::init(&prepare), py::keep_alive<1, 5>(), py::keep_alive<1, 6>(), py::keep_alive<1, 7>(),
           py::keep_alive<1, 8>(), py::keep_alive<1, 9>(), py::keep_alive<1, 14>(), arg("rule"), arg("state_format"),
           arg("block_size"), arg("params"), arg("grads"), arg("states"), arg("scales"), arg("steps"), arg("hyper"),
           arg("grad_scale") = py::none(), arg("found_inf") = py::none(), arg("seed") = py::none(),
           arg("corrections") = py::none())
      .def("run", &take, "Take the step.");
  m.def("encode_state", encode_state_into, arg("values"), arg("state_format"), arg("is_signed"), arg("block_size"),
        arg("codes"), arg("scale"),
        "Write the codes and scales of float32 ``values`` as a step would store them; a block with inf or nan gets the "
        "scale nan.");
  m.def("decode_state", decode_state_into, arg("codes"), arg("scale"), arg("state_format"), arg("is_signed"),
        arg("block_size"), arg("values"),
        "Write the float32 values of codes and scales; inverse of encode_state up to rounding.");
}

}  // namespace lowbit
