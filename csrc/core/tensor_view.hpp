// SPDX-License-Identifier: Apache-2.0
// A non-owning view of a tensor: pointer, element type, device, shape, strides in elements.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <ostream>
#include <span>

#include "core/dtype.hpp"
#include "core/place.hpp"

namespace lowbit {

struct TensorView {
  static constexpr int kMaxRank = 8;

  void* data = nullptr;
  DType dtype = DType::other;
  Device device{};
  int rank = 0;
  std::array<int64_t, kMaxRank> shape{};
  std::array<int64_t, kMaxRank> stride{};

  explicit operator bool() const { return dtype != DType::other || data != nullptr; }  // false: argument not given

  int64_t size(int dim) const { return shape[dim < 0 ? rank + dim : dim]; }
  int64_t numel() const {
    int64_t count = 1;
    for (int i = 0; i < rank; i++) count *= shape[i];
    return count;
  }
  bool is_contiguous() const {
    int64_t expected = 1;
    for (int i = rank - 1; i >= 0; i--) {
      if (shape[i] != 1 && stride[i] != expected) return numel() == 0;
      expected *= shape[i];
    }
    return true;
  }
  template <class T>
  T* as() const { return static_cast<T*>(data); }
};

// A shape in an error message. Formatted only if printed: checks create one in every call.
struct ShapeText {
  std::span<const int64_t> sizes;

  friend std::ostream& operator<<(std::ostream& out, const ShapeText& shape) {
    out << "[";
    for (std::size_t i = 0; i < shape.sizes.size(); i++) out << (i ? ", " : "") << shape.sizes[i];
    return out << "]";
  }
};

inline ShapeText shape_text(const TensorView& view) {
  return {{view.shape.data(), static_cast<std::size_t>(view.rank)}};
}
inline ShapeText shape_text(std::initializer_list<int64_t> sizes) { return {{sizes.begin(), sizes.size()}}; }

}  // namespace lowbit
