// SPDX-License-Identifier: Apache-2.0
// The list of backends in this build, best first: the only file with #if LOWBIT_WITH_*.

#include "core/once.hpp"
#include "cpu/backend.hpp"
#include "ops/kernel.hpp"
#include "sim/backend.hpp"

namespace lowbit {

std::span<const Backend* const> backends() {
  static std::atomic<const std::vector<const Backend*>*> kept{nullptr};
  return made_once(kept, [] {
    std::vector<const Backend*> all;
    const auto add = [&](std::span<const Backend* const> some) { all.insert(all.end(), some.begin(), some.end()); };
    add(cpu::backends());
    add(sim::backends(cpu::backends()));
    return all;
  });
}

}  // namespace lowbit
