// SPDX-License-Identifier: Apache-2.0
#include "torch/boxed.hpp"

#include <array>
#include <atomic>
#include <optional>

#include "core/once.hpp"
#include "core/os.hpp"
#include "core/private_use.hpp"

namespace lowbit::torch {
namespace {

DType dtype_of(int32_t torch_dtype) {
  const Symbols& torch = loaded_symbols();
  for (int i = 0; i < static_cast<int>(DType::other); i++)
    if (torch.dtypes[i] == torch_dtype) return static_cast<DType>(i);
  return DType::other;
}

void ensure(Status status, std::string_view op, std::string_view what) {
  if (status == 0) [[likely]] return;
  const Symbols& torch = loaded_symbols();
  throw Error(ErrorKind::runtime,
              concat(op, ": torch failed: ", what, torch.exception_text ? concat(": ", torch.exception_text()) : ""));
}

std::atomic<bool> asks_for_devices{false};

Device device_of(TensorHandle tensor, std::string_view op, std::string_view name) {
  const Symbols& torch = loaded_symbols();
  int32_t type = 0, index = 0;
  ensure(torch.get_device_type(tensor, &type), op, "device of a tensor");
  ensure(torch.get_device_index(tensor, &index), op, "device of a tensor");
  for (int i = 0; i < kDeviceTypeCount; i++)
    if (const auto found = static_cast<DeviceType>(i); torch.device_types[i] == type && owns_its_numbers(found))
      return {.type = found, .index = static_cast<int16_t>(found == DeviceType::cpu ? 0 : index)};
  throw Error(ErrorKind::value, concat(op, ": ", name, " is on a device without kernels, torch's type ", type));
}

// The native handle of the device's current stream, if torch has a library for that device type. torch's stream number
// is not the handle there.
using RawStream = Status (*)(int32_t device_index, void** stream);
RawStream raw_stream_of(DeviceType type) {
  const std::string name(kDeviceTypes[static_cast<int>(type)].torch_name);
  void* const library = os::loaded_library(os::name_of_library(concat("torch_", name)).c_str());
  if (!library) return nullptr;
  const std::string symbol = concat("aoti_torch_get_current_", name, "_stream");
  const auto function = reinterpret_cast<RawStream>(os::find_symbol(library, symbol.c_str()));
  check(function != nullptr, ErrorKind::runtime, "this torch has no ", symbol);
  return function;
}

void* stream_of_torch(Device device) {
  constexpr std::string_view op = "lowbit";
  const Symbols& torch = loaded_symbols();
  static std::array<std::atomic<const RawStream*>, kDeviceTypeCount> kept{};
  const auto type = static_cast<std::size_t>(device.type);
  const RawStream raw = made_once(kept[type], [&] { return raw_stream_of(device.type); });
  if (raw) {
    void* current = nullptr;
    ensure(raw(device.index, &current), op, "the current stream");
    return current;
  }
  StreamHandle stream = nullptr;
  int64_t number = 0;
  ensure(torch.get_current_stream(device.index, &stream), op, "the current stream");
  const Status status = torch.stream_id(stream, &number);
  torch.delete_stream(stream);
  ensure(status, op, "the number of a stream");
  return reinterpret_cast<void*>(number);
}

// Memory from torch's allocator.
void* take_memory(std::string_view op, Device device, int64_t bytes, void** data) {
  TensorView view = contiguous_view(device, DType::uint8, 1, &bytes);
  Tensor tensor = Tensor::empty(op, view);
  *data = view.data;
  return tensor.release();
}
void give_back_memory(void* memory) { const Tensor freed(static_cast<TensorHandle>(memory)); }

}  // namespace

void look_at_devices() {
  static constexpr MemoryKeeper memory{take_memory, give_back_memory};
  asks_for_devices = true;
  ask_for_streams(stream_of_torch);
  ask_for_memory(&memory);
}

const Error* kept_for_torch(const Error& error) {
  static thread_local std::optional<Error> kept;
  return &kept.emplace(error);
}

void throw_for_torch(const Error& error) {
  switch (error.kind) {
    case ErrorKind::value: os::throw_python_error("PyExc_ValueError", error.what());
    case ErrorKind::type: os::throw_python_error("PyExc_TypeError", error.what());
    case ErrorKind::index: os::throw_python_error("PyExc_IndexError", error.what());
    case ErrorKind::not_implemented: os::throw_python_error("PyExc_NotImplementedError", error.what());
    case ErrorKind::runtime: break;
  }
  os::throw_python_error("PyExc_RuntimeError", error.what());
}

void refuse_gradient(std::string_view op, std::string_view name) {
  throw Error(ErrorKind::not_implemented,
              concat(op, ": ", name,
                     " must not require a gradient in a call below torch's autograd, which cannot record it: detach "
                     "it, or call under torch.no_grad()"));
}

TensorView contiguous_view(Device device, DType dtype, int rank, const int64_t* shape) {
  TensorView view{.dtype = dtype, .device = device, .rank = rank};
  int64_t stride = 1;
  for (int i = rank - 1; i >= 0; i--) {
    view.shape[i] = shape[i];
    view.stride[i] = stride;
    stride *= shape[i] > 1 ? shape[i] : 1;
  }
  return view;
}

void check_rank(std::string_view op, std::string_view name, int64_t rank) {
  check(rank <= TensorView::kMaxRank, ErrorKind::value, op, ": ", name, " must have at most ", TensorView::kMaxRank,
        " dimensions, got ", rank);
}

StableIValue to_optional_value(std::string_view op, Tensor&& tensor) {
  StableIValue* cell = nullptr;
  if (const Symbols& torch = loaded_symbols(); torch.new_stable_ivalue)
    ensure(torch.new_stable_ivalue(&cell), op, "an optional argument");
  else cell = new StableIValue;
  *cell = to_value(std::move(tensor));
  return reinterpret_cast<StableIValue>(cell);
}

Tensor Tensor::again(std::string_view op, TensorHandle handle) {
  TensorHandle other = nullptr;
  ensure(loaded_symbols().new_tensor_handle(handle, &other), op, "a handle of an argument");
  return Tensor(other);
}

TensorView Tensor::view(std::string_view op, std::string_view name) const {
  TensorView view;
  if (!handle_) return view;
  if (asks_for_devices.load(std::memory_order_relaxed)) view.device = device_of(handle_, op, name);
  const Symbols& torch = loaded_symbols();
  int64_t rank = 0, *sizes = nullptr, *strides = nullptr;
  int32_t dtype = 0;
  ensure(torch.get_dim(handle_, &rank), op, "rank of a tensor");
  check_rank(op, name, rank);
  ensure(torch.get_sizes(handle_, &sizes), op, "sizes of a tensor");
  ensure(torch.get_strides(handle_, &strides), op, "strides of a tensor");
  ensure(torch.get_dtype(handle_, &dtype), op, "dtype of a tensor");
  view.dtype = dtype_of(dtype);
  view.rank = static_cast<int>(rank);
  for (int i = 0; i < view.rank; i++) view.shape[i] = sizes[i], view.stride[i] = strides[i];
  const void* data = nullptr;
  ensure(torch.get_const_data_ptr(handle_, &data), op, "data of a tensor");
  view.data = const_cast<void*>(data);
  check(view.data || view.numel() == 0, ErrorKind::value, op, ": ", name, " has no data (a fake or wrapped tensor)");
  return view;
}

TensorView Tensor::written_view(std::string_view op, std::string_view name) const {
  TensorView written = view(op, name);
  if (handle_) ensure(loaded_symbols().get_data_ptr(handle_, &written.data), op, "data of a tensor that is written");
  return written;
}

Tensor Tensor::empty(std::string_view op, TensorView& view) {
  const Symbols& torch = loaded_symbols();
  check(view.dtype != DType::other, ErrorKind::type, op, ": the dtype of a result is none that is supported");
  TensorHandle handle = nullptr;
  ensure(torch.empty_strided(view.rank, view.shape.data(), view.stride.data(),
                             torch.dtypes[static_cast<int>(view.dtype)],
                             torch.device_types[static_cast<int>(view.device.type)], view.device.index, &handle),
         op, "allocation of the result");
  Tensor tensor(handle);
  ensure(torch.get_data_ptr(handle, &view.data), op, "data of the result");
  return tensor;
}

TensorView Tensor::dense_view(std::string_view op, std::string_view name) {
  const TensorView given = view(op, name);
  return given.rank == 0 || given.size(-1) <= 1 || given.stride[given.rank - 1] == 1 ? given
                                                                                     : contiguous_view(op, name);
}

TensorView Tensor::contiguous_view(std::string_view op, std::string_view name) {
  const TensorView given = view(op, name);
  if (!handle_ || given.is_contiguous()) return given;
  TensorView copied = contiguous_like(given, given.dtype);
  Tensor copy = empty(op, copied);
  ensure(loaded_symbols().copy(copy.handle_, handle_, 0), op, "a contiguous copy of an argument");
  std::swap(handle_, copy.handle_);
  return copied;
}

List List::empty(std::string_view op, size_t capacity) {
  ListHandle handle = nullptr;
  ensure(loaded_symbols().new_list(capacity, &handle), op, "a list");
  return List(handle);
}

std::vector<StableIValue> List::values(std::string_view op) const {
  const Symbols& torch = loaded_symbols();
  size_t size = 0;
  ensure(torch.list_size(handle_, &size), op, "size of a list");
  std::vector<StableIValue> values(size);
  for (size_t i = 0; i < size; i++) ensure(torch.list_item(handle_, i, &values[i]), op, "item of a list");
  return values;
}

std::vector<Tensor> List::tensors(std::string_view op) const {
  std::vector<Tensor> tensors;
  for (const StableIValue value : values(op)) tensors.push_back(Tensor::take(value));
  return tensors;
}

void List::push(std::string_view op, StableIValue value) {
  ensure(loaded_symbols().list_push(handle_, value), op, "item of a list");
}

}  // namespace lowbit::torch
