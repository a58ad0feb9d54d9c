// SPDX-License-Identifier: Apache-2.0
// The C functions of torch's stable ABI that lowbit uses, looked up in the running torch: no torch header, no link, any
// torch from 2.10 on, the first version that has them all. Declared after torch/csrc/inductor/aoti_torch/c/shim.h and
// torch/csrc/stable/c/shim.h (torch promises two years of compatibility).
#pragma once

#include <cstdint>
#include <string>

#include "core/dtype.hpp"
#include "core/place.hpp"

namespace lowbit::torch {

using StableIValue = uint64_t;                                  // an argument or result of a boxed kernel
using BoxedKernel = void (*)(StableIValue* stack, uint64_t arguments, uint64_t results);
using TensorHandle = struct AtenTensorOpaque*;
using LibraryHandle = struct TorchLibraryOpaque*;
using ListHandle = struct StableListOpaque*;
using StreamHandle = struct StreamOpaque*;
using Status = int32_t;                                         // 0: success

struct Symbols {
  // registration
  Status (*library_init_fragment)(const char* ns, const char* file, uint32_t line, LibraryHandle* library) = nullptr;
  Status (*library_init_impl)(const char* ns, const char* key, const char* file, uint32_t line,
                              LibraryHandle* library) = nullptr;
  Status (*library_def)(LibraryHandle, const char* schema) = nullptr;
  Status (*library_impl)(LibraryHandle, const char* name, BoxedKernel, uint64_t abi) = nullptr;
  // tensors
  Status (*get_dim)(TensorHandle, int64_t*) = nullptr;
  Status (*get_sizes)(TensorHandle, int64_t**) = nullptr;
  Status (*get_strides)(TensorHandle, int64_t**) = nullptr;
  Status (*get_dtype)(TensorHandle, int32_t*) = nullptr;
  Status (*get_data_ptr)(TensorHandle, void**) = nullptr;
  Status (*get_device_type)(TensorHandle, int32_t*) = nullptr;
  Status (*get_device_index)(TensorHandle, int32_t*) = nullptr;
  Status (*get_const_data_ptr)(TensorHandle, const void**) = nullptr;  // leaves a copy-on-write tensor shared
  Status (*empty_strided)(int64_t rank, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                          int32_t device_type, int32_t device_index, TensorHandle*) = nullptr;
  Status (*new_tensor_handle)(TensorHandle, TensorHandle* other) = nullptr;  // a second handle of the same tensor
  Status (*delete_tensor)(TensorHandle) = nullptr;
  bool (*grad_mode_is_enabled)() = nullptr;
  bool (*requires_grad)(const void* tensor_impl) = nullptr;  // not in the stable ABI; null if missing
  Status (*copy)(TensorHandle into, TensorHandle from, int32_t non_blocking) = nullptr;
  Status (*new_stable_ivalue)(StableIValue**) = nullptr;        // torch >= 2.13, else null: plain new
  Status (*delete_stable_ivalue)(StableIValue*) = nullptr;      // torch >= 2.13, else null: plain delete
  const char* (*exception_text)() = nullptr;  // torch >= 2.13, else null: the error of the last failed call
  Status (*new_list)(size_t capacity, ListHandle*) = nullptr;
  Status (*delete_list)(ListHandle) = nullptr;
  Status (*list_size)(ListHandle, size_t*) = nullptr;
  Status (*list_item)(ListHandle, size_t index, StableIValue*) = nullptr;  // an owned handle if the item is a tensor
  Status (*list_push)(ListHandle, StableIValue) = nullptr;
  // streams of devices other than the CPU
  Status (*get_current_stream)(int32_t device_index, StreamHandle*) = nullptr;
  Status (*delete_stream)(StreamHandle) = nullptr;
  Status (*stream_id)(StreamHandle, int64_t*) = nullptr;
  int32_t device_types[kDeviceTypeCount] = {};                  // torch's number of each DeviceType
  int32_t dtypes[static_cast<int>(DType::other)] = {};          // torch's number of each DType before DType::other
};

// Remembered once torch is loaded; until then each call looks again. Null: `reason` says why.
const Symbols* symbols(std::string* reason);
const Symbols& loaded_symbols();  // for boxed kernels: there torch is loaded

}  // namespace lowbit::torch
