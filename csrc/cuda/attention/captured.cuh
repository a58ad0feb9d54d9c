// SPDX-License-Identifier: Apache-2.0
// Gradients of tensors captured by score_mod, by atomics and yet with the same bits every time: integers are added,
// whose sum does not depend on order. A first pass over the scores finds the largest value added to a tensor. `high`
// has the bits that it and the number of scores leave of 62, and `low` as many more below: a float32 within 2^60 of the
// largest keeps all its bits. Values that are not finite are added as float32, where any order is right, too.
#pragma once

#include "cuda/attention/scores.cuh"

namespace lowbit::cuda {

// An accumulator of a gradient, for d<n> of score/print.hpp.
struct Sums {
  const AttentionCall& call;
  int tensor;
  int64_t at = 0;

  LOWBIT_INLINE explicit operator bool() const { return call.gradients[tensor].sums; }
  LOWBIT_INLINE Sums operator+(int64_t elements) const { return {call, tensor, at + elements}; }
};

LOWBIT_INLINE double power_of_2_double(int exponent) {
  return __longlong_as_double(static_cast<long long>(exponent + 1023) << 52);
}
LOWBIT_INLINE int exponent_above(uint32_t bits) { return static_cast<int>(bits >> 23) - 126; }  // next power of two

LOWBIT_INLINE void add_to(const Sums& to, float value) {
  if (value == 0) return;
  const CapturedGradientCall& gradient = to.call.gradients[to.tensor];
  uint32_t* largest = to.call.largest + to.tensor;
  const uint32_t bits = __float_as_uint(value) & 0x7fffffffu;
  const bool finite = bits < 0x7f800000u;
  if (!to.call.adds) {
    if (finite && bits > *static_cast<volatile uint32_t*>(largest)) atomicMax(largest, bits);
    return;
  }
  ExactSum* sum = gradient.sums + blockIdx.x % gradient.copies * gradient.count + to.at;
  if (!finite) {
    atomicAdd(&sum->special, value);
    return;
  }
  const double scaled = value * power_of_2_double(to.call.sum_bits - exponent_above(*largest));
  const long long high = __double2ll_rn(scaled),
                  low = __double2ll_rn((scaled - static_cast<double>(high)) * power_of_2_double(to.call.sum_bits));
  if (high) atomicAdd(&sum->high, static_cast<unsigned long long>(high));
  if (low) atomicAdd(&sum->low, static_cast<unsigned long long>(low));
}

// A CTA processes 128 elements of each tensor in turn.
template <class Each>
LOWBIT_INLINE void for_each_captured(const AttentionCall& call, Each each) {
  for (int tensor = 0; tensor < kMaxCaptured; tensor++) {
    const int64_t at = static_cast<int64_t>(blockIdx.x) * kAttentionThreads + threadIdx.x;
    if (call.gradients[tensor].sums && at < call.gradients[tensor].count) each(tensor, call.gradients[tensor], at);
  }
}

LOWBIT_INLINE void captured_start(const AttentionCall& call) {
  if (blockIdx.x == 0 && threadIdx.x < kMaxCaptured) call.largest[threadIdx.x] = 0;
  for_each_captured(call, [&](int, const CapturedGradientCall& gradient, int64_t at) {
    for (int64_t copy = 0; copy < gradient.copies; copy++) gradient.sums[copy * gradient.count + at] = {0, 0, 0.0f};
  });
}

LOWBIT_INLINE void captured_finish(const AttentionCall& call) {
  for_each_captured(call, [&](int tensor, const CapturedGradientCall& gradient, int64_t at) {
    unsigned long long high = 0, low = 0;
    float special = 0;
    for (int64_t copy = 0; copy < gradient.copies; copy++) {
      const ExactSum& sum = gradient.sums[copy * gradient.count + at];
      high += sum.high, low += sum.low, special += sum.special;
    }
    const double scaled = static_cast<double>(static_cast<long long>(high)) +
                          static_cast<double>(static_cast<long long>(low)) * power_of_2_double(-call.sum_bits);
    const double total = scaled * power_of_2_double(exponent_above(call.largest[tensor]) - call.sum_bits) + special;
    if (gradient.dtype == DType::float64) static_cast<double*>(gradient.to)[at] = total;
    else if (gradient.dtype == DType::float32) static_cast<float*>(gradient.to)[at] = static_cast<float>(total);
    else static_cast<uint16_t*>(gradient.to)[at] = gradient.dtype == DType::bfloat16
                                                       ? bfloat16_from_float(static_cast<float>(total))
                                                       : float16_from_float(static_cast<float>(total));
  });
}

}  // namespace lowbit::cuda
