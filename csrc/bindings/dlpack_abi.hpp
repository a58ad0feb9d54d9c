// SPDX-License-Identifier: Apache-2.0
// The part of DLPack 1.x's C exchange API that a reader of tensors needs, declared after
// its specification (dmlc.github.io/dlpack).
#pragma once

#include <cstdint>

namespace lowbit::dlpack {

enum DeviceType : int32_t { kCpu = 1, kCudaHost = 3, kRocmHost = 11 };
enum TypeCode : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6 };

struct Tensor {
  void* data;
  struct {
    int32_t type, id;
  } device;
  int32_t rank;
  struct {
    uint8_t code, bits;
    uint16_t lanes;
  } dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null: contiguous
  uint64_t byte_offset;
};

// An owned tensor, in a capsule named "dltensor" until a consumer takes it.
struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

inline constexpr const char* kExchangeApiName = "dlpack_exchange_api";  // name of the capsule

struct ExchangeApi {
  struct {
    struct {
      uint32_t major, minor;
    } version;
    void* previous;
  } header;
  void* allocate;
  void* owned_from_object;
  void* owned_to_object;
  int (*view_of_object)(void* object, Tensor* view);  // borrowed: valid while the object lives; may be null
  void* current_work_stream;
};

}  // namespace lowbit::dlpack
