// SPDX-License-Identifier: Apache-2.0
// oneDNN's row of the op linear. Calls that oneDNN cannot serve are refused here; matmul.hpp runs the others.
#include <cstring>

#include "core/arena.hpp"
#include "core/once.hpp"
#include "core/parallel.hpp"
#include "core/scratch.hpp"
#include "formats/format.hpp"
#include "onednn/backend.hpp"
#include "onednn/matmul.hpp"
#include "ops/linear.hpp"

namespace lowbit::onednn {
namespace {

Product product_of(const LinearArgs& args, const Threads& threads) {
  const WeightSpec& spec = args.weight_spec;
  return {.m = args.m, .n = spec.n, .k = spec.padded_k(), .activation = args.activation, .bias = args.bias != nullptr,
          .mul = args.mul != nullptr, .add = args.add != nullptr, .threads = threads.count()};
}

// The text is valid until this thread asks again.
std::string_view refuses(const LinearArgs& args) {
  if (args.weight_spec.format != Format::float32) return "another weight format";
  if (args.dtype != DType::float32) return "activations that are not float32";
  if (args.low_rank) return kNoLowRank;
  if (args.activation == Activation::relu) return "relu of oneDNN makes 0 of nan";
  if (args.activation == Activation::gelu) return "gelu of oneDNN makes nan of inf";
  thread_local std::string reason;
  try {
    const Threads threads;
    reason = matmul(product_of(args, threads))->reason();
  } catch (const std::exception& error) {  // a listing of all rows continues with the reasons of the others
    reason = error.what();
  }
  return reason;
}

// Copies rows of x with zeros appended: a weight's padding, multiplied by memory past a row of x, could give nan.
void pad_rows(const LinearArgs& args, int64_t padded, float* to) {
  const int64_t k = args.weight_spec.k;
  const auto bytes = [](int64_t count) { return static_cast<std::size_t>(count) * sizeof(float); };
  parallel_for(args.m, threads_worth(8 * args.m * padded), [&](int64_t row) {
    std::memcpy(to + row * padded, static_cast<const float*>(args.x) + row * k, bytes(k));
    std::memset(to + row * padded + k, 0, bytes(padded - k));
  });
}

void widen_bias(const LinearArgs& args, float* to) {
  const auto* const halves = static_cast<const uint16_t*>(args.bias);
  for (int64_t i = 0; i < args.weight_spec.n; i++)
    to[i] = args.bias_dtype == DType::bfloat16 ? float_from_bfloat16(halves[i]) : float_from_float16(halves[i]);
}

void run(const LinearArgs& args) {
  const Threads threads;
  const auto product = matmul(product_of(args, threads));
  const int64_t k = args.weight_spec.padded_k();
  const bool is_padded = args.weight_spec.k != k, is_widened = args.bias && args.bias_dtype != DType::float32;
  struct Call {
    char* library;
    float *x, *bias;
  };
  const auto arrays = [&](Arena arena) {
    Call call{.library = arena.array<char>(product->scratchpad_bytes()),
              .x = arena.array<float>(is_padded ? args.m * k : 0),
              .bias = arena.array<float>(is_widened ? args.weight_spec.n : 0)};
    return std::pair(call, arena.bytes);
  };
  const Scratch memory(arrays({}).second);
  const Call call = arrays(memory.arena()).first;
  if (is_padded) pad_rows(args, k, call.x);
  if (is_widened) widen_bias(args, call.bias);
  product->run({.x = is_padded ? call.x : args.x, .weight = args.weight, .bias = is_widened ? call.bias : args.bias,
                .mul = args.mul, .add = args.add, .y = args.y, .scratchpad = call.library});
}

constexpr Kernel<LinearArgs> kRows[] = {{"linear_float32_onednn", refuses, run}};

}  // namespace

std::span<const Backend* const> backends() {
  static std::atomic<const std::vector<const Backend*>*> kept{nullptr};
  return made_once(kept, [] {
    auto* backend = new Backend{  // two threads may create one each; the one that is not kept leaks, once
        .name = "onednn", .device = DeviceType::cpu, .unavailable = unavailable};
    add_rows(*backend, kRows, std::size(kRows));
    return std::vector<const Backend*>{backend};
  });
}

}  // namespace lowbit::onednn
