// SPDX-License-Identifier: Apache-2.0
// Exports a tensor to torch, which takes a capsule named "dltensor".
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "bindings/dlpack_abi.hpp"

namespace lowbit {

struct Offered {
  dlpack::ManagedTensor managed{};
  std::vector<int64_t> shape, strides;
  void (*release)(void* data) noexcept = nullptr;

  static void destroy(dlpack::ManagedTensor* managed) {
    auto* const offered = static_cast<Offered*>(managed->context);
    if (offered->release) offered->release(managed->tensor.data);
    delete offered;
  }
};

inline void destroy_unused(PyObject* capsule) {
  if (!PyCapsule_IsValid(capsule, "dltensor")) return;  // a consumer that took it calls the deleter
  auto* const managed = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
  managed->deleter(managed);
}

struct OfferedDevice {
  int32_t type, index;
};
struct OfferedDType {
  int code, bits;
};

// `release` is called with the data once the last reference to the tensor is gone; null: the memory has another owner.
inline pybind11::capsule offer(void* data, OfferedDevice device, std::vector<int64_t> shape,
                               std::vector<int64_t> strides, OfferedDType dtype,
                               void (*release)(void*) noexcept = nullptr) {
  auto* const offered =
      new Offered{.shape = std::move(shape), .strides = std::move(strides), .release = release};
  offered->managed = {.tensor = {.data = data,
                                 .device = {device.type, device.index},
                                 .rank = static_cast<int32_t>(offered->shape.size()),
                                 .dtype = {static_cast<uint8_t>(dtype.code), static_cast<uint8_t>(dtype.bits), 1},
                                 .shape = offered->shape.data(),
                                 .strides = offered->strides.data(),
                                 .byte_offset = 0},
                      .context = offered,
                      .deleter = Offered::destroy};
  return pybind11::capsule(&offered->managed, "dltensor", destroy_unused);
}

}  // namespace lowbit
