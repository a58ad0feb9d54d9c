// SPDX-License-Identifier: Apache-2.0
#include "cuda/backend.hpp"

#include <cstdlib>

#include "core/once.hpp"
#include "core/os.hpp"
#include "cuda/runtime/driver.hpp"
#include "cuda/runtime/libraries.hpp"

namespace lowbit::cuda {
namespace {

void run_in_context(const Place& place, const std::function<void()>& row) {
  const InContext here(place.device);
  row();
}

}  // namespace

std::span<const Backend* const> backends() {
  static std::atomic<const std::vector<const Backend*>*> kept{nullptr};
  return made_once(kept, [] {
    auto* backend = new Backend{  // two threads may create one each; the one that is not kept leaks, once
        .name = "cuda", .device = DeviceType::cuda, .unavailable = unavailable, .guard = run_in_context};
    add_cudnn_rows(*backend), add_prompt_rows(*backend), add_decode_rows(*backend);
    add_attention_rows(*backend), add_planned_cudnn_rows(*backend), add_cache_rows(*backend);
    add_linear_rows_of_warpgroups(*backend), add_linear_rows_of_many(*backend), add_linear_rows(*backend);
    add_experts_rows(*backend);
    add_optim_rows(*backend), add_pack_rows(*backend), add_quantize_rows(*backend);
    return std::vector<const Backend*>{backend};
  });
}

bool is_emulated() {
  if (!std::getenv("LOWBIT_CUDA_PATH")) return false;
  const Library& driver = library(LibraryName::driver);
  return driver.handle && os::find_symbol(driver.handle, "lowbit_emulates_cuda");
}

}  // namespace lowbit::cuda
