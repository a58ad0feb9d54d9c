// SPDX-License-Identifier: Apache-2.0
// Stack entries of a boxed call. A Tensor or list is an owned handle; an optional is null or a heap cell with the
// value; int, float and bool are stored as bits.
#pragma once

#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "core/tensor_view.hpp"
#include "torch/symbols.hpp"

namespace lowbit::torch {

// Whether a gradient is wanted; false if this torch has no function for it. A handle is an at::Tensor*, which is one
// pointer to a c10::TensorImpl.
inline bool requires_grad(TensorHandle tensor) {
  const auto ask = loaded_symbols().requires_grad;
  return tensor && ask && ask(*reinterpret_cast<const void* const*>(tensor));
}

class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(TensorHandle handle) : handle_(handle) {}
  Tensor(Tensor&& other) noexcept : handle_(other.release()) {}
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  Tensor& operator=(Tensor&&) = delete;
  ~Tensor() {
    if (handle_) loaded_symbols().delete_tensor(handle_);
  }

  TensorHandle handle() const { return handle_; }
  TensorHandle release() { return std::exchange(handle_, nullptr); }
  TensorView view(std::string_view op, std::string_view name) const;  // for reading; empty if the tensor is missing
  // For writing: a copy-on-write clone (torch._lazy_clone) gets its own memory first.
  TensorView written_view(std::string_view op, std::string_view name) const;

  static Tensor take(StableIValue value) { return Tensor(reinterpret_cast<TensorHandle>(value)); }
  static Tensor take_optional(StableIValue value) {
    auto* cell = reinterpret_cast<StableIValue*>(value);
    if (!cell) return Tensor();
    const StableIValue inner = *cell;
    if (const Symbols& torch = loaded_symbols(); torch.delete_stable_ivalue) torch.delete_stable_ivalue(cell);
    else delete cell;
    return take(inner);
  }
  static Tensor again(std::string_view op, TensorHandle handle);  // a second handle of the same tensor
  // A new tensor with the view's dtype, device, shape and strides; sets view.data.
  static Tensor empty(std::string_view op, TensorView& view);
  // The view of this tensor; if its last dimension is not dense, that of a contiguous copy.
  TensorView dense_view(std::string_view op, std::string_view name);
  TensorView contiguous_view(std::string_view op, std::string_view name);

 private:
  TensorHandle handle_ = nullptr;
};

class List {
 public:
  List() = default;
  explicit List(ListHandle handle) : handle_(handle) {}
  List(List&& other) noexcept : handle_(other.release()) {}
  List& operator=(List&&) = delete;
  ~List() {
    if (handle_) loaded_symbols().delete_list(handle_);
  }

  ListHandle release() { return std::exchange(handle_, nullptr); }
  std::vector<StableIValue> values(std::string_view op) const;
  std::vector<Tensor> tensors(std::string_view op) const;
  void push(std::string_view op, StableIValue value);

  static List take(StableIValue value) { return List(reinterpret_cast<ListHandle>(value)); }
  static List empty(std::string_view op, size_t capacity);

 private:
  ListHandle handle_ = nullptr;
};

inline int64_t to_int(StableIValue value) { return static_cast<int64_t>(value); }
inline bool to_bool(StableIValue value) { return (value & 0xff) != 0; }

inline StableIValue to_value(Tensor&& tensor) { return reinterpret_cast<StableIValue>(tensor.release()); }
inline StableIValue to_value(List&& list) { return reinterpret_cast<StableIValue>(list.release()); }
StableIValue to_optional_value(std::string_view op, Tensor&& tensor);

TensorView contiguous_view(Device device, DType dtype, int rank, const int64_t* shape);  // without data
inline TensorView contiguous_like(const TensorView& view, DType dtype) {
  return contiguous_view(view.device, dtype, view.rank, view.shape.data());
}
void check_rank(std::string_view op, std::string_view name, int64_t rank);

// From now on, tensors are asked for their device, and torch for its current stream there. Before, all are taken for
// CPU tensors: kernels are registered for the CPU alone.
void look_at_devices();

[[noreturn]] void refuse_gradient(std::string_view op, std::string_view name);

// A copy of this thread's last error.
const Error* kept_for_torch(const Error& error);
// Throws it as the exception that torch's Python layer converts to the right Python type (os::throw_python_error).
[[noreturn]] void throw_for_torch(const Error& error);

}  // namespace lowbit::torch
