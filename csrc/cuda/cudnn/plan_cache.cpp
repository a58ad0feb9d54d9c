// SPDX-License-Identifier: Apache-2.0
#include "cuda/cudnn/plan_cache.hpp"

#include <bit>
#include <chrono>
#include <cstdio>
#include <map>
#include <mutex>
#include <optional>

#include "core/once.hpp"
#include "cuda/cudnn/library.hpp"
#include "cuda/runtime/cubin_cache.hpp"
#include "cuda/runtime/driver.hpp"

namespace lowbit::cuda {
namespace {

constexpr std::size_t kMaxPlans = 4096;  // 0.1 MB each, plus their code on the device

struct Plans {
  mutable std::mutex mutex;
  mutable std::map<std::pair<int16_t, AttentionShape>, Plan> made;  // nodes never move
  Plan too_many{.graph = nullptr, .refused = concat("this process has ", kMaxPlans, " plans of cuDNN already")};
  Plan captured{.graph = nullptr,
                .refused = "there is no plan of cuDNN for these sizes yet, and none is made while a stream is captured "
                           "in a CUDA graph: call the same once before (lowbit.warmup)"};
};

std::string text_of(const AttentionShape& shape) {
  std::string text = concat(shape.batch, " ", shape.heads, " ", shape.kv_heads, " ", shape.q_length, " ",
                            shape.kv_length, " ", shape.e, " ", shape.ev, " ", name_of(shape.dtype), " ",
                            std::bit_cast<uint32_t>(shape.scale), " ", shape.causal, " ", shape.backward, " ",
                            shape.has_lse, " ", shape.ends_together, " ", shape.window, " ",
                            name_of(shape.bias_dtype));
  const auto add = [&](const auto& numbers) {
    for (const int64_t number : numbers) text += concat(" ", number);
  };
  for (const auto& strides : shape.stride) add(strides);
  add(shape.bias_size), add(shape.bias_stride);
  return text;
}

// Prints one line on stderr, like the compilation of a kernel.
Plan make_and_keep(const AttentionShape& shape, const CudnnDevice& device, const std::string& path) {
  const auto started = std::chrono::steady_clock::now();
  Plan plan = make_plan(shape, device);
  if (!plan.graph) return plan;
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  const std::string lost = write_cached(path, image_of(plan));
  std::fprintf(stderr, "lowbit: made a plan of cuDNN for attention_%s in %.2f s, %s %s\n",
               shape.backward ? "backward" : "forward", seconds, lost.empty() ? "kept in" : "not kept:",
               lost.empty() ? path.c_str() : lost.c_str());
  return plan;
}

Plan read_or_make(const AttentionShape& shape, const Place& place) {
  const InContext here(place.device);
  std::optional<HandleFor> handle;
  try {
    handle.emplace(place);
  } catch (const Error& error) {  // no handle for the device: a refusal, as our own rows need none
    return {.graph = nullptr, .refused = error.what()};
  }
  const CudnnDevice device{.handle = handle->get()};
  const std::string path =
      cached_plan_path(concat("attention ", cudnn_version(), " ", text_of(shape)),
                       concat(architecture(place.device), "-", multiprocessors(place.device)));
  if (const auto image = read_cached(path))  // from another build of cuDNN, or damaged: made again
    if (Plan plan = read_plan(*image, device); plan.graph) return plan;
  return make_and_keep(shape, device, path);
}

}  // namespace

int64_t max_workspace(const AttentionShape& shape) {
  const int64_t of_q = shape.q_length * shape.e, of_keys = shape.kv_length * (shape.e + shape.ev);
  return (int64_t{256} << 20) + 4 * shape.batch * shape.heads * (of_q + of_keys);
}

const Plan& plan_for(const AttentionShape& shape, const Place& place) {
  static std::atomic<const Plans*> kept{nullptr};
  const Plans& plans = made_once(kept, [] { return Plans(); });
  const std::lock_guard lock(plans.mutex);
  const std::pair wanted(place.device.index, shape);
  if (const auto found = plans.made.find(wanted); found != plans.made.end()) return found->second;
  if (is_captured(place)) return plans.captured;
  if (plans.made.size() >= kMaxPlans) return plans.too_many;
  return plans.made.try_emplace(wanted, read_or_make(shape, place)).first->second;
}

}  // namespace lowbit::cuda
