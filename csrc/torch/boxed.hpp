// SPDX-License-Identifier: Apache-2.0
// Decoding a boxed call. The stack hands every tensor over: a kernel first takes all of them (nothing throws), then looks at them, so that
// an error frees them too. A Tensor is an owned handle; an optional is null or a heap cell with the value; int and bool are bits.
#pragma once

#include <string_view>
#include <utility>

#include "core/error.hpp"
#include "core/tensor_view.hpp"
#include "torch/symbols.hpp"

namespace lowbit::torch {

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

  TensorHandle release() { return std::exchange(handle_, nullptr); }
  TensorView view(std::string_view op, std::string_view name) const;  // empty view of a missing tensor

  static Tensor take(StableIValue value) { return Tensor(reinterpret_cast<TensorHandle>(value)); }
  static Tensor take_optional(StableIValue value) {
    auto* cell = reinterpret_cast<StableIValue*>(value);
    if (!cell) return Tensor();
    const StableIValue inner = *cell;
    if (const Symbols& torch = loaded_symbols(); torch.delete_stable_ivalue) torch.delete_stable_ivalue(cell);
    else delete cell;
    return take(inner);
  }
  // A new contiguous CPU tensor of the view's dtype and shape; sets view.data.
  static Tensor empty(std::string_view op, TensorView& view);

 private:
  TensorHandle handle_ = nullptr;
};

inline int64_t to_int(StableIValue value) { return static_cast<int64_t>(value); }
inline bool to_bool(StableIValue value) { return (value & 0xff) != 0; }
inline StableIValue to_value(Tensor&& tensor) { return reinterpret_cast<StableIValue>(tensor.release()); }

TensorView contiguous_view(DType dtype, int rank, const int64_t* shape);  // without data

// Runs a kernel and turns lowbit::Error into the exception that torch's Python layer shows as the right kind.
[[noreturn]] void rethrow_for_torch(const Error& error);

template <auto kernel>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  try {
    kernel(stack);
  } catch (const Error& error) {
    rethrow_for_torch(error);
  }
}

}  // namespace lowbit::torch
