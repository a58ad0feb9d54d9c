// SPDX-License-Identifier: Apache-2.0
#include "bindings/tensor_caster.hpp"

#include <cstring>
#include <optional>

#include "bindings/dlpack_abi.hpp"
#include "core/private_use.hpp"
#include "ops/kernel.hpp"
#include "torch/described.hpp"

namespace lowbit {
namespace {

using enum ErrorKind;

// The exchange API of a type, or null: an object that is not a capsule of that name, such as an int, could hold any
// address. Cached for the last few types (always under the GIL).
const dlpack::ExchangeApi* find_exchange_api(PyTypeObject* type) {
  // The second name is that of torch 2.9 and 2.10.
  for (const char* name : {"__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__"}) {
    const py::object attribute = py::getattr(reinterpret_cast<PyObject*>(type), name, py::none());
    if (!PyCapsule_IsValid(attribute.ptr(), dlpack::kExchangeApiName)) continue;
    const auto* api = static_cast<const dlpack::ExchangeApi*>(
        PyCapsule_GetPointer(attribute.ptr(), dlpack::kExchangeApiName));
    if (api->header.version.major == 1 && api->view_of_object) return api;
  }
  return nullptr;
}

const dlpack::ExchangeApi* exchange_api(PyTypeObject* type) {
  struct Entry {
    PyTypeObject* type;
    const dlpack::ExchangeApi* api;
  };
  static Entry cache[8] = {};
  static unsigned next = 0;
  for (const Entry& entry : cache)
    if (entry.type == type) return entry.api;
  const dlpack::ExchangeApi* api = find_exchange_api(type);
  Entry& entry = cache[next++ % 8];
  Py_INCREF(type);  // a cached type must not be freed, or another one could take its address
  Py_XDECREF(entry.type);
  entry = {type, api};
  return api;
}

DType dtype_of_dlpack(uint8_t code, int bits) {
  switch (code << 8 | bits) {
    case dlpack::kFloat << 8 | 32: return DType::float32;
    case dlpack::kFloat << 8 | 16: return DType::float16;
    case dlpack::kFloat << 8 | 64: return DType::float64;
    case dlpack::kBfloat << 8 | 16: return DType::bfloat16;
    case dlpack::kUInt << 8 | 8: return DType::uint8;
    case dlpack::kInt << 8 | 8: return DType::int8;
    case dlpack::kInt << 8 | 32: return DType::int32;
    case dlpack::kInt << 8 | 64: return DType::int64;
    case dlpack::kBool << 8 | 8: return DType::boolean;
    default: return DType::other;
  }
}

DType dtype_of_buffer(const Py_buffer& buffer) {
  const char* format = buffer.format ? buffer.format : "B";
  if (*format == '<' || *format == '=' || *format == '@') format++;
  if (std::strlen(format) != 1) return DType::other;
  switch (*format) {
    case 'f': return DType::float32;
    case 'e': return DType::float16;
    case 'd': return DType::float64;
    case 'B': return DType::uint8;
    case 'b': return DType::int8;
    case '?': return DType::boolean;
    case 'i': case 'l': case 'q': return buffer.itemsize == 8 ? DType::int64 : DType::int32;
    default: return DType::other;
  }
}

// Host memory that is mapped for another device counts as CPU memory.
std::optional<Device> device_of_dlpack(int32_t type, int32_t index) {
  if (type == dlpack::kCpu || type == dlpack::kCudaHost || type == dlpack::kRocmHost) return Device{};
  for (int i = 0; i < kDeviceTypeCount; i++)
    if (const auto found = static_cast<DeviceType>(i);
        kDeviceTypes[i].dlpack == type && owns_its_numbers(found) && has_backend(found))
      return Device{.type = found, .index = static_cast<int16_t>(index)};
  return std::nullopt;
}

void check_rank(int64_t rank, const char* what) {
  check(rank <= TensorView::kMaxRank, value, what, " must have at most ", TensorView::kMaxRank, " dimensions, got ",
        rank);
}

// A lazily negated tensor (torch: x.conj().imag) would be read with the wrong sign. It is a view of a complex tensor,
// so its dtype is floating. Lazy conj tensors are complex, a dtype that lowbit does not have.
void check_not_negated(py::handle object, DType dtype, const char* what) {
  if (!is_activation(dtype) && dtype != DType::float64) return;
  static PyObject* const name = PyUnicode_InternFromString("is_neg");
  PyObject* const result = PyObject_CallMethodNoArgs(object.ptr(), name);
  const bool negated = result == Py_True;
  Py_XDECREF(result);
  PyErr_Clear();
  check(!negated, value, what, " has a lazy negative bit, call resolve_neg() first");
}

// The pending Python exception as one line: torch appends a C++ backtrace to its own.
std::string take_python_error() {
  const py::error_already_set error;
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

std::string type_name(py::handle object) { return py::str(py::type::handle_of(object).attr("__name__")); }

}  // namespace

TensorArgument::TensorArgument(py::handle object, const char* what, Access access, bool optional) {
  if (optional && object.is_none()) return;
  if (!from_dlpack(object, what) && !from_buffer(object, what, access) && !from_attributes(object, what)) [[unlikely]]
    throw Error(type, concat(what, " must be a torch CPU tensor or a numpy array", optional ? " or None" : "", ", got ",
                             type_name(object)));  // creates a Python string
  check(reinterpret_cast<uintptr_t>(view_.data) % size_of(view_.dtype) == 0, value, what, " must be aligned to its ",
        size_of(view_.dtype), " bytes of ", name_of(view_.dtype), ", got an address that is not");
}

TensorArgument::~TensorArgument() {
  if (buffer_.obj) PyBuffer_Release(&buffer_);
}

bool TensorArgument::from_dlpack(py::handle object, const char* what) {
  const dlpack::ExchangeApi* api = exchange_api(Py_TYPE(object.ptr()));
  if (!api) return false;
  dlpack::Tensor tensor{};
  if (api->view_of_object(object.ptr(), &tensor) != 0)  // sparse, meta, batched: torch's own message
    throw Error(type, concat(what, " must be a dense CPU tensor: ", take_python_error()));
  check_rank(tensor.rank, what);
  const std::optional<Device> device = device_of_dlpack(tensor.device.type, tensor.device.id);
  check(device.has_value(), value, what, " must be on the CPU, got DLPack device type ", tensor.device.type);
  view_.device = *device;
  view_.dtype = tensor.dtype.lanes == 1 ? dtype_of_dlpack(tensor.dtype.code, tensor.dtype.bits) : DType::other;
  view_.rank = tensor.rank;
  int64_t contiguous = 1;
  for (int i = tensor.rank - 1; i >= 0; i--) {
    view_.shape[i] = tensor.shape[i];
    view_.stride[i] = tensor.strides ? tensor.strides[i] : contiguous;
    contiguous *= tensor.shape[i];
  }
  check(tensor.data || contiguous == 0, value, what, " has no data (a fake or wrapped tensor)");
  view_.data = tensor.data ? static_cast<char*>(tensor.data) + tensor.byte_offset : nullptr;
  check_not_negated(object, view_.dtype, what);
  return true;
}

bool TensorArgument::from_buffer(py::handle object, const char* what, Access access) {
  if (!PyObject_CheckBuffer(object.ptr())) return false;
  const int flags = PyBUF_STRIDES | PyBUF_FORMAT | (access == Access::write ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(object.ptr(), &buffer_, flags) != 0) {
    buffer_.obj = nullptr;
    throw Error(value,
                concat(what, access == Access::write ? " must be a writable array: " : ": ", take_python_error()));
  }
  try {
    check_rank(buffer_.ndim, what);
    check(buffer_.itemsize > 0, type, what, " must have elements of some bytes, got an array of elements of ",
          buffer_.itemsize);
    view_.dtype = dtype_of_buffer(buffer_);
    view_.rank = buffer_.ndim;
    view_.data = buffer_.buf;
    for (int i = 0; i < view_.rank; i++) {
      check(buffer_.strides[i] % buffer_.itemsize == 0, value, what, " must have strides of whole elements");
      view_.shape[i] = buffer_.shape[i];
      view_.stride[i] = buffer_.strides[i] / buffer_.itemsize;
    }
  } catch (...) {
    PyBuffer_Release(&buffer_);  // a throwing constructor runs no destructor
    throw;
  }
  return true;
}

// torch before 2.9 has no exchange API.
bool TensorArgument::from_attributes(py::handle object, const char* what) {
  if (!py::hasattr(object, "data_ptr") || !py::hasattr(object, "stride")) return false;
  const std::string device = py::str(object.attr("device").attr("type"));
  check(device == "cpu", value, what, " must be on the CPU, got ", device);
  const auto shape = py::tuple(object.attr("shape")), stride = py::tuple(object.attr("stride")());
  check_rank(static_cast<int64_t>(shape.size()), what);
  const std::string name = py::str(object.attr("dtype"));  // "torch.float32"
  view_.dtype = torch::dtype_named(name.substr(name.find('.') + 1));
  view_.rank = static_cast<int>(shape.size());
  for (int i = 0; i < view_.rank; i++)
    view_.shape[i] = shape[i].cast<int64_t>(), view_.stride[i] = stride[i].cast<int64_t>();
  view_.data = reinterpret_cast<void*>(object.attr("data_ptr")().cast<uintptr_t>());
  check(view_.data || view_.numel() == 0, value, what, " has no data (a fake or wrapped tensor)");
  check_not_negated(object, view_.dtype, what);
  return true;
}

}  // namespace lowbit
