// SPDX-License-Identifier: Apache-2.0
// The arguments of a C program (lowbit/lowbit.h) as the ops take them, and their errors as numbers.
#pragma once

#include <string_view>

#include "core/tensor_view.hpp"
#include "formats/layout.hpp"
#include "lowbit/lowbit.h"

namespace lowbit::capi {

// The status of the exception that is being handled; its text becomes the last error of this thread.
int failed() noexcept;

template <class Body>
int status_of(Body&& body) noexcept {
  try {
    body();
    return LOWBIT_OK;
  } catch (...) {
    return failed();
  }
}

// A tensor that must be given, and one that may be missing.
TensorView tensor(std::string_view op, std::string_view name, const lowbit_tensor* given);
TensorView optional(std::string_view op, std::string_view name, const lowbit_tensor* given);

// Copies a struct that begins with its size, of another version perhaps: fields that the caller's lacks are 0, and
// those that this library does not know must be.
void copy_struct(std::string_view op, std::string_view name, const void* given, void* to, std::size_t size,
                 std::size_t first_size);

// A struct that grew has its size in API version 1 here.
template <class Struct>
constexpr std::size_t kFirstSize = sizeof(Struct);

template <class Options>
Options options(std::string_view op, const Options* given) {
  Options copied{};
  if (given) copy_struct(op, "options", given, &copied, sizeof copied, kFirstSize<Options>);
  return copied;
}

struct PackedWeight {
  WeightSpec spec;
  Layout layout;
  Sections sections;
  TensorView packed;
};

// All but the data.
PackedWeight described_weight(std::string_view op, std::string_view name, const lowbit_packed_weight* given);
PackedWeight packed_weight(std::string_view op, std::string_view name, const lowbit_packed_weight* given);
// In the layout of the kernels.
PackedWeight kernel_weight(std::string_view op, std::string_view name, const lowbit_packed_weight* given);

}  // namespace lowbit::capi
