// SPDX-License-Identifier: Apache-2.0
// Conversion of a C program's arguments (lowbit/lowbit.h) to those of the ops, and of errors to numbers.
#pragma once

#include <string_view>

#include "core/tensor_view.hpp"
#include "formats/layout.hpp"
#include "lowbit/lowbit.h"

namespace lowbit::capi {

// The status for the exception being handled; its text becomes the last error of this thread.
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

// A required tensor, and one that may be missing.
TensorView tensor(std::string_view op, std::string_view name, const lowbit_tensor* given);
TensorView optional(std::string_view op, std::string_view name, const lowbit_tensor* given);

// Copies a struct that begins with its size, perhaps of another version: fields missing from the caller's become 0, and
// fields unknown to this library must be 0.
void copy_struct(std::string_view op, std::string_view name, const void* given, void* to, std::size_t size,
                 std::size_t first_size);

// Specialized for a struct that grew: its size in API version 1.
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

// The weight without its data.
PackedWeight described_weight(std::string_view op, std::string_view name, const lowbit_packed_weight* given);
PackedWeight packed_weight(std::string_view op, std::string_view name, const lowbit_packed_weight* given);
// The weight, which must be in the layout of the kernels.
PackedWeight kernel_weight(std::string_view op, std::string_view name, const lowbit_packed_weight* given);
void check_kernel_layout(std::string_view op, std::string_view name, Layout layout);

}  // namespace lowbit::capi
