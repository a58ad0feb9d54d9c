// SPDX-License-Identifier: Apache-2.0
#include "ops/place.hpp"

#include "score/program.hpp"

namespace lowbit {
namespace {

bool is_on(const TensorView& view, Device device) { return !view || view.device == device; }

}  // namespace

Device device_of(std::string_view op, std::initializer_list<NamedTensor> tensors) {
  const auto& [first, like] = *tensors.begin();
  for (const auto& [name, view] : tensors)
    if (!is_on(view, like.device)) [[unlikely]]
      throw Error(ErrorKind::value, concat(op, ": ", name, " must be on ", name_of(like.device), " as ", first,
                                           " is, got ", name_of(view.device)));
  return like.device;
}

Place place_of(std::string_view op, std::initializer_list<NamedTensor> tensors) {
  const Device device = device_of(op, tensors);
  return {.device = device, .stream = current_stream(device)};
}

void check_on(const Place& place, std::string_view op, std::string_view name, std::span<const TensorView> list) {
  for (const TensorView& view : list)
    if (!is_on(view, place.device)) [[unlikely]]
      throw Error(ErrorKind::value, concat(op, ": ", name, "[", &view - list.data(), "] must be on ",
                                           name_of(place.device), ", got ", name_of(view.device)));
}

void check_on(const Place& place, std::string_view op, std::string_view name, const ScoreCall* call) {
  if (call) check_on(place, op, name, {call->captured(), static_cast<std::size_t>(call->captured_count())});
}

}  // namespace lowbit
