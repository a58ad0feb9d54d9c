// SPDX-License-Identifier: Apache-2.0
// optim_step: every tensor of a table in one launch. A CTA updates kTaskElements consecutive elements of one tensor:
// parameter, gradient and codes are read once and written once, the new moments wait in registers until the largest of
// their block is known.
#pragma once

#include "gpu/optim/constants.hpp"
#include "gpu/optim/moments.cuh"

namespace lowbit::gpu {

// Before the step, in a launch of its own: every CTA of the step reads the same count.
LOWBIT_INLINE void count_steps(const StepTable& table) {
  if (table.found_inf && *table.found_inf != 0) return;
  for (int i = static_cast<int>(threadIdx.x); i < table.count; i += kStepThreads) *table.tensor[i].step_count += 1;
}

// Rounds up to bfloat16 with the probability of the part that is cut off; inf and nan stay.
LOWBIT_INLINE f32 round_stochastically(f32 value, int element, int32_t key) {
  const i32 up = add(bits_of(value), shift_right<16>(random_bits(i32{element}, key)));
  const i32 cut = bit_and(up, i32{static_cast<int32_t>(0xffff0000)});
  return float_of(select(at_least(abs(value), f32{0.0f}), cut, bits_of(value)));
}

template <StateFormat kFormat, class Rule, int kBlock, int kEach = elements_each(kBlock)>
struct Update {
  static constexpr int kMoments = Rule::kMoments, n = kEach, kLanes = kBlock / n;
  static constexpr DType kDType = kFormat == StateFormat::bfloat16 ? DType::bfloat16 : DType::float32;

  const OptimTensor& tensor;
  const Constants<Rule>& constants;
  int64_t at, left;  // this thread's first element, and the number from it on; none: 0 or less

  // Old values of moment k as value * factor, times the rule's factor for them (carry).
  template <int k>
  LOWBIT_INLINE void read(f32 (&value)[n], f32 (&factor)[n]) const {
    const float carry = constants.rule.carry[k];
    if constexpr (has_codes(kFormat)) {
      f32 number[n];
      load_codes<kFormat>(static_cast<const uint8_t*>(tensor.moment[k]), at, left, number);
      const typename Codes<kFormat, Rule::template kSigned<k>>::Decoder decode(
          scale_at<kBlock>(tensor.scale[k], at, tensor.numel) * carry);
#pragma unroll
      for (int i = 0; i < n; i++) {
        decode(number[i], value[i], factor[i]);
        if (i >= left) value[i] = f32{0.0f};
      }
    } else {
      load_floats(tensor.moment[k], kDType, at, left, value);
#pragma unroll
      for (int i = 0; i < n; i++) factor[i] = f32{carry};
    }
  }

  template <int k>
  LOWBIT_INLINE void write(f32 (&value)[n], int32_t* warps) const {
    const float unit = constants.rule.unit[k];
    constexpr bool kSigned = Rule::template kSigned<k>;
    if constexpr (has_codes(kFormat)) {
      i32 bits{0};
#pragma unroll
      for (int i = 0; i < n; i++) {
        if (i >= left) value[i] = f32{0.0f};
        bits = larger<kSigned>(bits, value[i]);
      }
      i32 code[n];
      const float scale = encode_values<kFormat, kSigned>(largest_of_block<kLanes>(bits.lane & INT32_MAX, warps), unit,
                                                          value, code);
      store_codes<kFormat>(static_cast<uint8_t*>(tensor.moment[k]), at, left, code,
                           Codes<kFormat, kSigned>::kOffset);
      if (left > 0 && at % kBlock == 0) tensor.scale[k][at / kBlock] = scale;
    } else {
#pragma unroll
      for (int i = 0; i < n; i++) value[i] = mul(value[i], f32{unit});
      store_floats(tensor.moment[k], kDType, at, left, value);
    }
  }

  template <int k>
  LOWBIT_INLINE void read_from(f32 (&value)[kMoments + 1][n], f32 (&factor)[kMoments + 1][n]) const {
    if constexpr (k < kMoments) read<k>(value[k], factor[k]), read_from<k + 1>(value, factor);
  }
  template <int k>
  LOWBIT_INLINE void write_from(f32 (&value)[kMoments + 1][n], int32_t (*warps)[kStepWarps]) const {
    if constexpr (k < kMoments) write<k>(value[k], warps[k]), write_from<k + 1>(value, warps);
  }

  LOWBIT_INLINE void run(int32_t (*warps)[kStepWarps]) const {
    f32 p[n], g[n], value[kMoments + 1][n], factor[kMoments + 1][n];
    load_floats(tensor.grad, tensor.grad_dtype, at, left, g);
    load_floats(tensor.param, tensor.param_dtype, at, left, p);
    read_from<0>(value, factor);
    if (constants.scaled) {
#pragma unroll
      for (int i = 0; i < n; i++) g[i] = mul(g[i], f32{constants.grad_factor});
      store_floats(tensor.grad, tensor.grad_dtype, at, left, g);
    }
    const int32_t key = constants.stochastic ? block_key(constants.seed, at / constants.block_size) : 0;
    const int element = static_cast<int>(at & (constants.block_size - 1));
#pragma unroll
    for (int i = 0; i < n; i++) {
      if (constants.negated) g[i] = sub(f32{0.0f}, g[i]);
      if (constants.adds_l2) g[i] = fma(p[i], f32{constants.l2}, g[i]);
      f32 moment[kMoments + 1], carried[kMoments + 1];
#pragma unroll
      for (int k = 0; k < kMoments; k++) moment[k] = value[k][i], carried[k] = factor[k][i];
      p[i] = constants.rule.update(p[i], f32{constants.keep}, g[i], moment, carried);
#pragma unroll
      for (int k = 0; k < kMoments; k++) value[k][i] = moment[k];
      if (constants.stochastic) p[i] = round_stochastically(p[i], element + i, key);
    }
    store_floats(tensor.param, tensor.param_dtype, at, left, p);
    write_from<0>(value, warps);
  }
};

// The last tensor of the table whose first task is not after this CTA's.
LOWBIT_INLINE int tensor_of_task(const StepTable& table, int32_t task) {
  int found = 0, end = table.count;
  while (end - found > 1) {
    const int middle = (found + end) / 2;
    if (table.first_task[middle] <= task) found = middle;
    else end = middle;
  }
  return found;
}

// Elements of a tensor from `first` on, which a CTA updates.
template <class Rule, StateFormat kFormat, int kBlock, int kEach = elements_each(kBlock)>
LOWBIT_INLINE void update_task(const OptimTensor& tensor, const Constants<Rule>& constants, int64_t first) {
  using ThisUpdate = Update<kFormat, Rule, kBlock, kEach>;
  constexpr int kChunk = kStepThreads * ThisUpdate::n;
  static_assert(kTaskElements % kChunk == 0 && kChunk % kBlock == 0);
  // Two chunks take turns, so that one barrier each is enough.
  LOWBIT_SHARED(int32_t, warps, [2][kMaxMoments][kStepWarps]);
  for (int64_t chunk = first; chunk < first + kTaskElements && chunk < tensor.numel; chunk += kChunk) {
    const int64_t at = chunk + static_cast<int64_t>(threadIdx.x) * ThisUpdate::n;
    ThisUpdate{tensor, constants, at, tensor.numel - at}.run(warps[chunk / kChunk & 1]);
  }
}

template <class Rule, StateFormat kFormat, int kBlock>
LOWBIT_INLINE void step(const StepTable& table) {
  if (table.found_inf && *table.found_inf != 0) return;
  const auto task = static_cast<int32_t>(blockIdx.x);
  const int index = tensor_of_task(table, task);
  const OptimTensor& tensor = table.tensor[index];
  LOWBIT_SHARED(unsigned char, shared, [sizeof(Constants<Rule>)]);
  if (threadIdx.x == 0) {
    const Constants<Rule> made(table, tensor, table.first_tensor + index, *tensor.step_count);
    std::memcpy(shared, &made, sizeof made);
  }
  __syncthreads();
  const auto& constants = *reinterpret_cast<const Constants<Rule>*>(shared);
  update_task<Rule, kFormat, kBlock>(tensor, constants, (task - table.first_task[index]) * kTaskElements);
}

}  // namespace lowbit::gpu
