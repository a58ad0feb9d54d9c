// SPDX-License-Identifier: Apache-2.0
// The list of backends in this build, best first.
#include "core/once.hpp"
#include "cpu/backend.hpp"
#include "cuda/backend.hpp"
#include "external/backends.hpp"
#include "level_zero/backend.hpp"
#include "onednn/backend.hpp"
#include "ops/kernel.hpp"
#include "sim/backend.hpp"

namespace lowbit {

std::span<const Backend* const> backends() {
  static std::atomic<const std::vector<const Backend*>*> kept{nullptr};
  return made_once(kept, [] {
    std::vector<const Backend*> all;
    const auto add = [&](std::span<const Backend* const> some) { all.insert(all.end(), some.begin(), some.end()); };
    add(cpu::backends());
    add(cuda::backends());
    add(level_zero::backends());
    std::vector<const Backend*> host(cpu::backends().begin(), cpu::backends().end());
    if (cuda::is_emulated()) host.insert(host.end(), cuda::backends().begin(), cuda::backends().end());
    add(sim::backends(host));
    return external::with_external(all, onednn::backends());
  });
}

}  // namespace lowbit
