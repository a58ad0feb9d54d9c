// SPDX-License-Identifier: Apache-2.0
// Rows of third parties for Python (lowbit.backends): tables in shared libraries, and Python functions, which get the
// arguments of their op by name: tensors, names of enumerators, numbers.
#include "external/backends.hpp"

#include <pybind11/stl.h>

#include <cstring>

#include "bindings/dlpack_capsule.hpp"
#include "bindings/register.hpp"
#include "external/calls.hpp"

namespace lowbit {
namespace {

namespace py = pybind11;
using external::Row;

OfferedDType dlpack_dtype(DType dtype) {
  const int bits = static_cast<int>(size_of(dtype)) * 8;
  switch (dtype) {
    case DType::bfloat16: return {dlpack::kBfloat, bits};
    case DType::float32: case DType::float16: case DType::float64: return {dlpack::kFloat, bits};
    case DType::uint8: return {dlpack::kUInt, bits};
    case DType::boolean: return {dlpack::kBool, bits};
    default: return {dlpack::kInt, bits};
  }
}

// The arguments of one call as Python objects. Tensors are views of the call's memory; for `refuses` they are on
// torch's device "meta", without memory.
class Keywords {
 public:
  Keywords(const lowbit_place& place, bool is_question)
      : device_{kDeviceTypes[static_cast<int>(device_type("row", place.device))].dlpack, place.index},
        is_question_(is_question), torch_(py::module_::import("torch")) {}

  template <class Value>
  void add(const char* name, const Value& value) { result[name] = object(name, value); }
  void add_on_host(const char* name, const lowbit_tensor& value) { result[name] = tensor(value, {dlpack::kCpu, 0}); }

  py::dict result;

 private:
  py::object object(const char*, const lowbit_tensor& value) const { return tensor(value, device_); }
  py::object object(const char*, double value) const { return py::float_(value); }
  py::object object(const char*, int64_t value) const { return py::int_(value); }
  py::object object(const char*, uint64_t value) const { return py::int_(value); }
  py::object object(const char* name, int32_t value) const {
    const auto is = [&](const char* other) { return std::strcmp(name, other) == 0; };
    if (is("x_format")) return py::str(kXFormatNames[value]);
    if (is("activation")) return py::str(kActivationNames[value]);
    if (is("mapping")) return py::str(kMappingNames[value]);
    if (is("scale_choice")) return py::str(kScaleChoiceNames[value]);
    if (is("rule")) return py::str(kRuleNames[value]);
    if (is("format")) return py::str(kStateFormatNames[value]);
    if (is("moments")) return py::int_(value);
    return py::bool_(value != 0);
  }
  py::object object(const char*, const lowbit_weight& value) const {
    py::dict weight;
    weight["format"] = kFormatNames[value.format], weight["layout"] = kLayoutNames[value.layout];
    weight["n"] = value.n, weight["k"] = value.k, weight["group_size"] = value.group_size;
    weight["asymmetric"] = value.asymmetric != 0;
    weight["packed"] = flat(value.data, DType::uint8, {value.rows, value.row_bytes});
    return weight;
  }
  py::object object(const char*, const lowbit_blocked_weight& value) const {
    py::dict weight;
    weight["format"] = kFormatNames[value.format], weight["numel"] = value.numel;
    weight["block_size"] = value.block_size;
    weight["codes"] = tensor(value.codes, device_), weight["absmax"] = tensor(value.absmax, device_);
    weight["scale_codes"] = tensor(value.scale_codes, device_), weight["code_map"] = tensor(value.code_map, device_);
    weight["offset"] = tensor(value.offset, device_);
    return weight;
  }
  py::object object(const char*, const lowbit_attention_forward_args& value) const;

  py::object tensor(const lowbit_tensor& value, OfferedDevice device) const {
    const auto dtype = static_cast<DType>(value.dtype);
    if (dtype == DType::other) return py::none();
    std::vector<int64_t> shape(value.shape, value.shape + value.rank), stride(value.stride, value.stride + value.rank);
    if (is_question_) {
      const py::object meta = torch_.attr(std::string(name_of(dtype)).c_str());
      return torch_.attr("empty_strided")(shape, stride, py::arg("dtype") = meta, py::arg("device") = "meta");
    }
    return torch_.attr("utils").attr("dlpack").attr("from_dlpack")(
        offer(value.data, device, std::move(shape), std::move(stride), dlpack_dtype(dtype)));
  }
  py::object flat(const void* data, DType dtype, std::vector<int64_t> shape) const {
    std::vector<int64_t> stride(shape.size(), 1);
    for (std::size_t i = shape.size(); i-- > 1;) stride[i - 1] = stride[i] * shape[i];
    return tensor({const_cast<void*>(data), shape.data(), stride.data(), static_cast<int32_t>(shape.size()),
                   static_cast<int32_t>(dtype)}, device_);
  }

 public:
  // The tensors of a step, flattened; states as the formats store them, None for formats without scales.
  void add_tensors(const lowbit_optim_step_args& args) {
    py::list tensors;
    const auto format = static_cast<StateFormat>(args.format);
    for (int64_t i = 0; i < args.tensor_count; i++) {
      const lowbit_optim_tensor& each = args.tensors[i];
      py::dict one;
      py::list moments, scales;
      one["param"] = flat(each.param, static_cast<DType>(each.param_dtype), {each.numel});
      one["grad"] = flat(each.grad, static_cast<DType>(each.grad_dtype), {each.numel});
      for (int k = 0; k < args.moments; k++) {
        const DType dtype = format == StateFormat::float32 ? DType::float32
                            : format == StateFormat::bfloat16 ? DType::bfloat16 : DType::uint8;
        moments.append(flat(each.moment[k], dtype,
                            {state_bytes(format, each.numel) / static_cast<int64_t>(size_of(dtype))}));
        scales.append(has_codes(format)
                          ? flat(each.scale[k], DType::float32, {(each.numel + args.block_size - 1) / args.block_size})
                          : py::object(py::none()));
      }
      one["moments"] = moments, one["scales"] = scales;
      one["step"] = flat(each.step_count, DType::float32, {1});
      tensors.append(one);
    }
    result["tensors"] = tensors;
  }

 private:
  OfferedDevice device_;
  bool is_question_;
  py::module_ torch_;
};

#define F(field) add_field(keywords, args, #field, args.field);
#define H(field) keywords.add_on_host(#field, args.field);
template <class Args, class Value>
void add_field(Keywords& keywords, const Args& args, const char* name, const Value& value) {
  if constexpr (std::is_same_v<Value, const lowbit_optim_tensor*>) keywords.add_tensors(args);
  else keywords.add(name, value);
}
#define LOWBIT_OP(op, Args, fields) \
  void add_fields(Keywords& keywords, const lowbit_##op##_args& args) { fields }
LOWBIT_OFFERED_OPS(LOWBIT_OP)
#undef LOWBIT_OP
#undef F
#undef H

py::object Keywords::object(const char*, const lowbit_attention_forward_args& value) const {
  Keywords inner(value.call.place, is_question_);
  add_fields(inner, value);
  return inner.result;
}

template <class Args>
py::dict keywords_of(const void* args, bool is_question) {
  const Args& given = *static_cast<const Args*>(args);
  Keywords keywords(given.call.place, is_question);
  add_fields(keywords, given);
  return keywords.result;
}

using KeywordsOf = py::dict (*)(const void* args, bool is_question);
KeywordsOf keywords_of_op(std::string_view name) {
#define F(field)
#define H(field)
#define LOWBIT_OP(op, Args, fields) \
  if (name == #op) return keywords_of<lowbit_##op##_args>;
  LOWBIT_OFFERED_OPS(LOWBIT_OP)
#undef LOWBIT_OP
#undef F
#undef H
  return nullptr;
}

// KeyboardInterrupt and SystemExit are meant for the program, and are no failure of the running function.
bool ends_the_program(const py::error_already_set& error) { return !error.matches(PyExc_Exception); }

// Wraps a Python function, which is never freed, as rows are not. `refuses` returns a reason or None.
external::Function calling(py::function function, KeywordsOf keywords, bool is_question) {
  return [callee = function.release().ptr(), keywords, is_question](const void* args, char* text, std::size_t bytes) {
    const py::gil_scoped_acquire held;
    try {
      const py::object answer = py::reinterpret_borrow<py::function>(callee)(**keywords(args, is_question));
      if (!is_question || answer.is_none()) return 0;
      std::strncpy(text, std::string(py::str(answer)).c_str(), bytes - 1);
      return text[0] ? 1 : 0;
    } catch (const py::error_already_set& error) {
      if (ends_the_program(error)) throw external::PassedOn{std::current_exception()};
      std::strncpy(text, error.what(), bytes - 1);
      return 1;
    }
  };
}

// The rows added by one package.
struct Rows {
  std::vector<Row> rows;

  std::vector<std::string> add_library(const std::string& path) {
    std::vector<std::string> names;
    for (Row& row : external::rows_of_library(path)) names.push_back(rows.emplace_back(std::move(row)).name);
    return names;
  }
  void add_kernel(std::string op, std::string name, std::string device, py::function function,
                  std::optional<py::function> refuses, bool first) {
    const KeywordsOf keywords = keywords_of_op(op);
    check(keywords, ErrorKind::value, name, ": op must be one that is offered (lowbit.backends.OPS), got '", op, "'");
    rows.push_back({std::move(op), std::move(name), std::move(device), first,
                    refuses ? calling(*refuses, keywords, true) : external::Function(),
                    calling(std::move(function), keywords, false)});
  }
};

void collect() {
  const py::gil_scoped_acquire held;
  const py::dict modules = py::module_::import("sys").attr("modules");
  if (!modules.contains("lowbit")) return;  // only this extension is imported: its package would import torch
  try {
    py::module_::import("lowbit.backends.loading").attr("fill")();
  } catch (const py::error_already_set& error) {
    if (ends_the_program(error)) throw;
    throw Error(ErrorKind::runtime, std::string(py::str(error.value())));
  }
}

py::list added() {
  py::list rows;
  for (const external::AddedRow& row : external::added()) {
    py::dict one;
    one["name"] = row.name, one["op"] = row.op, one["device"] = row.device, one["by"] = row.by;
    rows.append(one);
  }
  return rows;
}

}  // namespace

void register_external(py::module_& parent) {
  using py::arg;
  py::module_ m = parent.def_submodule("external", "Kernel rows of third parties (lowbit.backends).");
  py::class_<Rows>(m, "Rows", "The rows that one package adds: all of them or, where something is wrong, none.")
      .def(py::init<>())
      .def("add_library", &Rows::add_library, arg("path"),
           "Add the rows of a shared library's table; return their names. ValueError: why it is refused.")
      .def("add_kernel", &Rows::add_kernel, arg("op"), arg("name"), arg("device"), arg("function"), arg("refuses"),
           arg("first"), "Add a function of Python as a row.")
      .def("commit", [](Rows& rows, const std::string& by) { external::add(by, std::move(rows.rows)); }, arg("by"),
           "Put the rows into the list, which must not be complete yet.");
  m.def("added", added, "Return the rows of third parties, in their order; the list of backends is complete then.");
  py::list ops;
#define F(field)
#define H(field)
#define LOWBIT_OP(op, Args, fields) ops.append(#op);
  LOWBIT_OFFERED_OPS(LOWBIT_OP)
#undef LOWBIT_OP
#undef F
#undef H
  m.attr("OPS") = py::tuple(ops);
  external::collect_with(collect);
}

}  // namespace lowbit
