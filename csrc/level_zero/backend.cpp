// SPDX-License-Identifier: Apache-2.0
#include "level_zero/backend.hpp"

#include "core/once.hpp"
#include "level_zero/runtime/driver.hpp"

namespace lowbit::level_zero {
namespace {

// What a row has given to the device is done when its call returns: the host and torch's own queues read the results.
void run_and_wait(const Place& place, const std::function<void()>& row) {
  row();
  wait(place.device);
}

Backend make_backend(std::string_view name, DeviceType type) {
  Backend backend{.name = name, .device = type, .unavailable = unavailable, .guard = run_and_wait};
  add_attention_rows(backend), add_decode_rows(backend), add_linear_rows(backend), add_quantize_rows(backend);
  return backend;
}

}  // namespace

std::span<const Backend* const> backends() {
  static std::atomic<const std::vector<const Backend*>*> kept{nullptr};
  return made_once(kept, [] {  // two threads may make them twice; what is not kept stays, once
    return std::vector<const Backend*>{new Backend(make_backend("level_zero", DeviceType::level_zero))};
  });
}

}  // namespace lowbit::level_zero
