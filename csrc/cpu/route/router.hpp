// SPDX-License-Identifier: Apache-2.0
// The product of a router: logits[t, e] = x[t] . weight[e] + bias[e], of float32 numbers. The weight is read as the
// model stores it, row by row, so that a changed weight counts at once. Each sum is that of 16 lanes, whatever else is
// in the call.
#pragma once

#include "core/parallel.hpp"
#include "cpu/loops.hpp"
#include "cpu/vector_io.hpp"
#include "ops/route.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int kRouterTokens = kFloatPanels == 2 ? 4 : 2, kRouterExperts = kRouterTokens;  // half of all registers

// The element of the first row, for kTokens rows of x and kExperts rows of the weight.
template <int kTokens, int kExperts>
void multiply(const Router& router, int64_t token, int64_t expert, const TensorView& logits) {
  const auto& [x, weight, bias, rounds] = router;
  const int64_t k = x.size(1);
  f32x16 sums[kTokens][kExperts];
  unroll<kTokens>([&](auto t) { unroll<kExperts>([&](auto e) { sums[t][e] = set1(0.0f); }); });
  for (int64_t i = 0; i < k; i += 16) {
    f32x16 factors[kExperts];
    unroll<kExperts>([&](auto e) {
      factors[e] = load_as_float(weight.data, weight.dtype, (expert + e) * k + i, k - i);
    });
    unroll<kTokens>([&](auto t) {
      const f32x16 row = load_as_float(x.data, x.dtype, (token + t) * k + i, k - i);
      unroll<kExperts>([&](auto e) { sums[t][e] = fma(row, factors[e], sums[t][e]); });
    });
  }
  unroll<kTokens>([&](auto t) {
    float* const row = logits.as<float>() + (token + t) * logits.size(1) + expert;
    unroll<kExperts>([&](auto e) { row[e] = sum(sums[t][e]); });
  });
}

// Adds the bias, and rounds to the dtype of x and back.
void finish_logits(const Router& router, int64_t begin, int64_t end, float* row) {
  const auto& [x, weight, bias, rounds] = router;
  for (int64_t i = begin; i < end; i += 16) {
    f32x16 value = load_as_float(row, DType::float32, i, end - i);
    if (bias) value = add(value, load_as_float(bias.data, bias.dtype, i, end - i));
    if (rounds && x.dtype != DType::float32) {
      alignas(64) uint16_t rounded[16];
      store_from_float(rounded, x.dtype, 0, 16, value);
      value = load_as_float(rounded, x.dtype, 0, 16);
    }
    store_from_float(row, DType::float32, i, end - i, value);
  }
}

void write_logits(const Router& router, const TensorView& logits) {
  const int64_t tokens = logits.size(0), experts = logits.size(1), k = router.x.size(1);
  const RowTiles of_tokens(tokens, 64), of_experts(experts, 16);  // 16 rows of 2048 are half of L2 at the most
  const int threads = threads_worth(tokens * experts * k);
  parallel_for(of_tokens.count * of_experts.count, threads, [&](int64_t task) {
    const int64_t tile = task % of_tokens.count, part = task / of_tokens.count;
    const int64_t begin = of_experts.begin(part), end = of_experts.begin(part + 1);
    for (int64_t t = of_tokens.begin(tile); t < of_tokens.begin(tile + 1);) {
      const int height = static_cast<int>(smaller(kRouterTokens, of_tokens.begin(tile + 1) - t));
      for (int64_t e = begin; e < end;) {
        const int width = static_cast<int>(smaller(kRouterExperts, end - e));
        if (height == kRouterTokens && width == kRouterExperts) {
          multiply<kRouterTokens, kRouterExperts>(router, t, e, logits);
        } else if (width == kRouterExperts) {
          for (int i = 0; i < height; i++) multiply<1, kRouterExperts>(router, t + i, e, logits);
        } else {
          for (int i = 0; i < height * width; i++) multiply<1, 1>(router, t + i / width, e + i % width, logits);
        }
        e += width;
      }
      for (int i = 0; i < height; i++) finish_logits(router, begin, end, logits.as<float>() + (t + i) * experts);
      t += height;
    }
  });
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
