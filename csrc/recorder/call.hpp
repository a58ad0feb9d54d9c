// SPDX-License-Identifier: Apache-2.0
// The bytes and operations of a call. Each op describes its calls once, beside its Args (`describe`); the flight
// recorder and the profiler store the description.
#pragma once

#include <array>
#include <concepts>
#include <initializer_list>

#include "core/tensor_view.hpp"

namespace lowbit {

// The arithmetic of a call, which decides the peak it is compared with. none: its products are not counted.
enum class Arithmetic : uint8_t { none, floating, integer };
inline constexpr std::string_view kArithmeticNames[] = {"", "float", "int8"};

struct Call {
  static constexpr int kTensors = 3, kSizes = 4;

  std::array<DType, kTensors> dtype{DType::other, DType::other, DType::other};  // other: no tensor
  std::array<uint8_t, kTensors> rank{};  // beyond kSizes dimensions, the last ones are kept
  Arithmetic arithmetic = Arithmetic::none;
  std::array<std::array<int64_t, kSizes>, kTensors> size{};
  int64_t read = 0, written = 0;  // min bytes that the call has to move
  int64_t operations = 0;         // multiplications and additions

  // Appends one of up to kTensors tensors.
  void add(DType of, const int64_t* sizes, int count) {
    for (int i = 0; i < kTensors; i++) {
      if (dtype[i] != DType::other) continue;
      dtype[i] = of, rank[i] = static_cast<uint8_t>(count);
      const int from = count > kSizes ? count - kSizes : 0;
      for (int dim = from; dim < count; dim++) size[i][dim - from] = sizes[dim];
      return;
    }
  }
  void add(DType of, std::initializer_list<int64_t> sizes) { add(of, sizes.begin(), static_cast<int>(sizes.size())); }
  void add(const TensorView& view) { add(view.dtype, view.shape.data(), view.rank); }
  Call with(const std::same_as<TensorView> auto&... views) && {
    (add(views), ...);
    return *this;
  }
};

// The bytes of all elements of a view; 0 for an absent argument.
inline int64_t bytes_of(const TensorView& view) {
  return view ? view.numel() * static_cast<int64_t>(size_of(view.dtype)) : 0;
}

}  // namespace lowbit
