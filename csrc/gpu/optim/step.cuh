// SPDX-License-Identifier: Apache-2.0
// optim_step: all tensors of a table in one launch. A CTA updates kTaskElements consecutive elements of one tensor:
// parameter, gradient and codes are read once and written once; new moments stay in registers until the largest of
// their block is known.
#pragma once

#include "gpu/optim/constants.hpp"
#include "gpu/optim/moments.cuh"

namespace lowbit::gpu {

// Before the step, in its own launch: increments the tensors' step counts, and computes the constants of each, which
// all of its CTAs read.
template <class Rule>
LOWBIT_INLINE void count_steps(const StepTable& table) {
  static_assert(sizeof(Constants<Rule>) <= kMaxConstantBytes);
  if (table.found_inf && *table.found_inf != 0) return;
  for (int i = static_cast<int>(threadIdx.x); i < table.count; i += kStepThreads) {
    const OptimTensor& tensor = table.tensor[i];
    static_cast<Constants<Rule>*>(table.constants)[i] =
        Constants<Rule>(table, tensor, table.position[i], *tensor.step_count += 1);
  }
}

// Rounds up to bfloat16 with a probability equal to the fraction cut off; inf and nan stay.
LOWBIT_INLINE f32 round_stochastically(f32 value, int element, int32_t key) {
  const i32 up = add(bits_of(value), shift_right<16>(random_bits(i32{element}, key)));
  const i32 cut = bit_and(up, i32{static_cast<int32_t>(0xffff0000)});
  return float_of(select(at_least(abs(value), f32{0.0f}), cut, bits_of(value)));
}

// kParam, kGrad: the dtypes of parameter and gradient; other: known at run time only.
template <StateFormat kFormat, class Rule, int kBlock, int kEach, DType kParam, DType kGrad>
struct Update {
  static constexpr int kMoments = Rule::kMoments, n = kEach, kLanes = kBlock / n;
  static constexpr DType kMomentDType = kFormat == StateFormat::bfloat16 ? DType::bfloat16 : DType::float32;
  // A run is 16 bytes of the widest dtype; all elements of a thread if dtypes are unknown.
  static constexpr bool kKnown = kParam != DType::other && kGrad != DType::other;
  static constexpr bool kWide = kParam == DType::float32 || kGrad == DType::float32 || kFormat == StateFormat::float32;
  static constexpr int kRun = !kKnown ? n : kWide ? 4 : n < 8 ? n : 8;
  using Elements = Runs<n, kRun, kRun * kLanes>;

  const OptimTensor& tensor;
  const Constants<Rule>& constants;
  int64_t at;  // this thread's first element
  int left;    // elements left in this CTA from there on; 0 or less: none
  bool whole;  // all of the thread's elements exist, word-aligned

  LOWBIT_INLINE DType param_dtype() const { return kParam == DType::other ? tensor.param_dtype : kParam; }
  LOWBIT_INLINE DType grad_dtype() const { return kGrad == DType::other ? tensor.grad_dtype : kGrad; }

  // A moment in memory format, with the scale of its block.
  struct RawMoment {
    std::conditional_t<has_codes(kFormat), RawCodes<kFormat, Elements>, RawFloats<Elements>> raw;
    float scale;

    template <bool kWhole>
    LOWBIT_INLINE void load(const Update& update, int k) {
      const OptimTensor& tensor = update.tensor;
      if constexpr (has_codes(kFormat)) {
        raw.template load<kWhole>(static_cast<const uint8_t*>(tensor.moment[k]), update.at, update.left);
        scale = scale_at<kBlock>(tensor.scale[k], update.at, tensor.numel);
      } else {
        raw.template load<kWhole>(tensor.moment[k], kMomentDType, update.at, update.left);
      }
    }
    template <bool kWhole>
    LOWBIT_INLINE void store(const Update& update, int k) const {
      const OptimTensor& tensor = update.tensor;
      if constexpr (has_codes(kFormat)) {
        raw.template store<kWhole>(static_cast<uint8_t*>(tensor.moment[k]), update.at, update.left);
        if (update.left > 0 && update.at % kBlock == 0) tensor.scale[k][update.at / kBlock] = scale;
      } else {
        raw.template store<kWhole>(tensor.moment[k], kMomentDType, update.at, update.left);
      }
    }
  };

  // Old values of moment k as value * factor, times the rule's factor (carry).
  template <int k>
  LOWBIT_INLINE void read(const RawMoment (&old)[kMoments + 1], f32 (&value)[kMoments + 1][n],
                          f32 (&factor)[kMoments + 1][n]) const {
    if constexpr (k < kMoments) {
      const float carry = constants.rule.carry[k];
      if constexpr (has_codes(kFormat)) {
        f32 number[n];
        old[k].raw.read(number);
        const typename Codes<kFormat, Rule::template kSigned<k>>::Decoder decode(old[k].scale * carry);
#pragma unroll
        for (int i = 0; i < n; i++) decode(number[i], value[k][i], factor[k][i]);
      } else {
        old[k].raw.read(kMomentDType, value[k]);
#pragma unroll
        for (int i = 0; i < n; i++) factor[k][i] = f32{carry};
      }
      read<k + 1>(old, value, factor);
    }
  }

  // New values, in the rule's units, in memory format.
  template <int k>
  LOWBIT_INLINE void write(f32 (&value)[kMoments + 1][n], RawMoment (&made)[kMoments + 1],
                           int32_t (*warps)[kStepWarps]) const {
    if constexpr (k < kMoments) {
      const float unit = constants.rule.unit[k];
      constexpr bool kSigned = Rule::template kSigned<k>;
      if constexpr (has_codes(kFormat)) {
        if (!whole) {
#pragma unroll
          for (int i = 0; i < n; i++)
            if (Elements::offset(i) >= left) value[k][i] = f32{0.0f};
        }
        i32 bits{0}, code[n];
#pragma unroll
        for (int i = 0; i < n; i++) bits = larger<kSigned>(bits, value[k][i]);
        made[k].scale = encode_values<kFormat, kSigned>(largest_of_block<kLanes>(bits.lane & INT32_MAX, warps[k]), unit,
                                                        value[k], code);
        made[k].raw.write(code, Codes<kFormat, kSigned>::kOffset);
      } else {
#pragma unroll
        for (int i = 0; i < n; i++) value[k][i] = mul(value[k][i], f32{unit});
        made[k].raw.write(kMomentDType, value[k]);
      }
      write<k + 1>(value, made, warps);
    }
  }

  // This thread's elements in memory format.
  struct Raw {
    RawFloats<Elements> grad, param;
    RawMoment moments[kMoments + 1];
  };

  template <bool kWhole>
  LOWBIT_INLINE void load_as(Raw& to) const {
    to.grad.template load<kWhole>(tensor.grad, grad_dtype(), at, left);
    to.param.template load<kWhole>(tensor.param, param_dtype(), at, left);
#pragma unroll
    for (int k = 0; k < kMoments; k++) to.moments[k].template load<kWhole>(*this, k);
  }
  template <bool kWhole>
  LOWBIT_INLINE void store_as(const Raw& from) const {
    if (constants.scaled) from.grad.template store<kWhole>(tensor.grad, grad_dtype(), at, left);
    from.param.template store<kWhole>(tensor.param, param_dtype(), at, left);
#pragma unroll
    for (int k = 0; k < kMoments; k++) from.moments[k].template store<kWhole>(*this, k);
  }

  // One branch for everything, so that all loads are issued before the first use.
  LOWBIT_INLINE void load(Raw& to) const {
    if (whole) load_as<true>(to);
    else load_as<false>(to);
  }

  LOWBIT_INLINE void run(Raw& raw, int32_t (*warps)[kStepWarps]) const {
    auto& [grad, param, moments] = raw;
    f32 p[n], g[n], value[kMoments + 1][n], factor[kMoments + 1][n];
    grad.read(grad_dtype(), g), param.read(param_dtype(), p), read<0>(moments, value, factor);
    if (constants.scaled) {
#pragma unroll
      for (int i = 0; i < n; i++) g[i] = mul(g[i], f32{constants.grad_factor});
      grad.write(grad_dtype(), g);
    }
    if (constants.negated) {
#pragma unroll
      for (int i = 0; i < n; i++) g[i] = sub(f32{0.0f}, g[i]);
    }
    if (constants.adds_l2) {
#pragma unroll
      for (int i = 0; i < n; i++) g[i] = fma(p[i], f32{constants.l2}, g[i]);
    }
#pragma unroll
    for (int i = 0; i < n; i++) {
      f32 moment[kMoments + 1], carried[kMoments + 1];
#pragma unroll
      for (int k = 0; k < kMoments; k++) moment[k] = value[k][i], carried[k] = factor[k][i];
      p[i] = constants.rule.update(p[i], f32{constants.keep}, g[i], moment, carried);
#pragma unroll
      for (int k = 0; k < kMoments; k++) value[k][i] = moment[k];
    }
    if (constants.stochastic) {
      const int64_t block_size = has_codes(kFormat) ? kBlock : constants.block_size;
      int32_t key = 0;
#pragma unroll
      for (int i = 0; i < n; i++) {
        const int64_t element = at + Elements::offset(i);
        if (i % kRun == 0) key = block_key(constants.seed, element / block_size);
        p[i] = round_stochastically(p[i], static_cast<int>(element & (block_size - 1)), key);
      }
    }
    param.write(param_dtype(), p), write<0>(value, moments, warps);
    if (whole) store_as<true>(raw);
    else store_as<false>(raw);
  }
};

// The last tensor of the table whose first task does not come after this CTA's.
LOWBIT_INLINE int tensor_of_task(const StepTable& table, int32_t task) {
  int found = 0, end = table.count;
  while (end - found > 1) {
    const int middle = (found + end) / 2;
    if (table.first_task[middle] <= task) found = middle;
    else end = middle;
  }
  return found;
}

template <int kMoments>
LOWBIT_INLINE bool lies_in_words(const OptimTensor& tensor) {
  bool aligned = is_aligned(tensor.param) && is_aligned(tensor.grad);
#pragma unroll
  for (int k = 0; k < kMoments; k++) aligned = aligned && is_aligned(tensor.moment[k]);
  return aligned;
}

// The elements of a tensor from `first` on that a CTA updates. kAhead: loads the next chunk before updating
// the current one.
template <class Rule, StateFormat kFormat, int kBlock, int kEach = elements_each(kBlock), DType kParam = DType::other,
          DType kGrad = DType::other, bool kAhead = true>
LOWBIT_INLINE void update_task(const OptimTensor& tensor, const Constants<Rule>& constants, int64_t first) {
  constexpr int kChunk = kStepThreads * kEach;
  static_assert(kTaskElements % kChunk == 0 && kChunk % kBlock == 0);
  const bool in_words = lies_in_words<Rule::kMoments>(tensor);
  // Two chunks alternate, so that one barrier each is enough.
  LOWBIT_SHARED(int32_t, warps, [2][kMaxMoments][kStepWarps]);
  using Chunk = Update<kFormat, Rule, kBlock, kEach, kParam, kGrad>;
  const int64_t rest = tensor.numel - first;
  const int count = static_cast<int>(rest < kTaskElements ? rest : kTaskElements);
  constexpr int kLanes = Chunk::kLanes, kSpan = Chunk::Elements::kSpan;
  const int thread = static_cast<int>(threadIdx.x);
  const int begin = thread / kLanes * kBlock + thread % kLanes * Chunk::kRun;
  const int64_t at = first + begin;
  const int left = count - begin;
  typename Chunk::Raw now, next;
  Chunk{tensor, constants, at, left, in_words && left >= kSpan}.load(now);
  for (int chunk = 0, ahead = kChunk; chunk < count; chunk = ahead, ahead += kChunk) {
    const Chunk update{tensor, constants, at + chunk, left - chunk, in_words && left - chunk >= kSpan};
    if (!kAhead && chunk > 0) update.load(now);
    if (kAhead && ahead < count)
      Chunk{tensor, constants, at + ahead, left - ahead, in_words && left - ahead >= kSpan}.load(next);
    update.run(now, warps[chunk / kChunk & 1]);
    if (kAhead) now = next;
  }
}

template <class Rule, StateFormat kFormat, int kBlock, DType kParam, DType kGrad, bool kAhead>
LOWBIT_INLINE void step(const StepTable& table) {
  if (table.found_inf && *table.found_inf != 0) return;
  const auto task = static_cast<int32_t>(blockIdx.x);
  const int index = tensor_of_task(table, task);
  const OptimTensor& tensor = table.tensor[index];
  constexpr int kWords = sizeof(Constants<Rule>) / sizeof(uint32_t);
  LOWBIT_SHARED(uint32_t, shared, [kWords]);
  if (threadIdx.x < kWords)
    shared[threadIdx.x] = static_cast<const uint32_t*>(table.constants)[index * kWords + threadIdx.x];
  __syncthreads();
  const auto& constants = *reinterpret_cast<const Constants<Rule>*>(shared);
  update_task<Rule, kFormat, kBlock, elements_each(kBlock), kParam, kGrad, kAhead>(
      tensor, constants, (task - table.first_task[index]) * kTaskElements);
}

}  // namespace lowbit::gpu
