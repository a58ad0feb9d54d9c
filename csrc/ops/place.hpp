// SPDX-License-Identifier: Apache-2.0
// The device on which a call runs: that of its tensors, which must all be on one.
#pragma once

#include <initializer_list>
#include <span>
#include <string_view>

#include "core/tensor_view.hpp"

namespace lowbit {

struct ScoreCall;

struct NamedTensor {
  std::string_view name;
  const TensorView& view;  // empty: not given
};

// The device of the first tensor of a call of `op`; the others must be on it too.
Device device_of(std::string_view op, std::initializer_list<NamedTensor> tensors);
// The place of the call: that device, and its current stream.
Place place_of(std::string_view op, std::initializer_list<NamedTensor> tensors);
// Checks that the tensors of a list, or those captured by a program, are on the device of the call.
void check_on(const Place& place, std::string_view op, std::string_view name, std::span<const TensorView> list);
void check_on(const Place& place, std::string_view op, std::string_view name, const ScoreCall* captured_by);

}  // namespace lowbit
