// SPDX-License-Identifier: Apache-2.0
#include "onednn/backend.hpp"

#include "core/once.hpp"
#include "onednn/runtime.hpp"

namespace lowbit::onednn {

std::span<const Backend* const> backends() {
  static std::atomic<const std::vector<const Backend*>*> kept{nullptr};
  return made_once(kept, [] {
    auto* backend = new Backend{  // two threads may make one each; what is not kept stays, once
        .name = "onednn", .device = DeviceType::cpu, .unavailable = unavailable};
    add_linear_rows(*backend), add_attention_rows(*backend);
    return std::vector<const Backend*>{backend};
  });
}

}  // namespace lowbit::onednn
