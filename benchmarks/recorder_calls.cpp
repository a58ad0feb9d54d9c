// SPDX-License-Identifier: Apache-2.0
// Calls of all_finite of one float with the recorder off, on, and inside of a profile, in turns: for bench_recorder.py.
// Prints the best nanoseconds of a call of each.
#include <chrono>
#include <cstdio>

#include "ops/quantize.hpp"
#include "recorder/dispatch.hpp"
#include "recorder/profile.hpp"

using namespace lowbit;

int main() {
  constexpr int kRounds = 200, kCalls = 20000;
  float value = 1;
  TensorView view{.data = &value, .dtype = DType::float32, .rank = 1};
  view.shape[0] = 1, view.stride[0] = 1;
  const auto sample = [&] {
    const auto begin = std::chrono::steady_clock::now();
    for (int call = 0; call < kCalls; call++) all_finite(view);
    return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count() / kCalls;
  };
  double best[3] = {1e9, 1e9, 1e9};
  for (int round = 0; round < kRounds; round++)
    for (int kind = 0; kind < 3; kind++) {
      const int64_t from = kind == 2 ? recorder::begin_profile() : 0;
      recorder::wants = kind == 1 ? recorder::kRing : kind == 2 ? recorder::kProfile : 0;
      const double took = sample();
      if (kind == 2) recorder::end_profile(from);
      if (took < best[kind]) best[kind] = took;
    }
  std::printf("%.1f %.1f %.1f\n", best[0], best[1], best[2]);
}
