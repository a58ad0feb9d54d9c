// SPDX-License-Identifier: Apache-2.0
// One block of one tensor: gradient, rule and rounding of the parameter in one pass over memory, 16 elements at a time in registers. The new moments
// wait in L1 until the block's largest is known, then become codes: p, g and the codes are read once and written once.
#pragma once

#include <utility>

#include "core/random.hpp"
#include "cpu/optim/moment.hpp"
#include "cpu/panel.hpp"
#include "ops/optim.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// What all blocks of a tensor share.
struct Common {
  f32x16 grad_factor, keep, l2;  // keep: 1 - lr * weight_decay if decoupled; l2: weight_decay if not
  bool scaled, negated, decays, adds_l2, stochastic;

  LOWBIT_INLINE Common(const OptimArgs& args, const OptimTensor& tensor)
      : grad_factor(set1(1.0f / args.grad_scale)), keep(set1(static_cast<float>(1 - args.hyper.lr * args.hyper.weight_decay))),
        l2(set1(static_cast<float>(args.hyper.weight_decay))), scaled(args.grad_scale != 1.0f), negated(args.hyper.maximize),
        decays(args.hyper.weight_decay != 0 && args.hyper.decoupled), adds_l2(args.hyper.weight_decay != 0 && !args.hyper.decoupled),
        stochastic(args.stochastic_rounding && tensor.param_dtype == DType::bfloat16) {}
};

// Up to bfloat16 with the probability of the part that is cut off; inf and nan stay.
LOWBIT_INLINE f32x16 round_stochastically(f32x16 value, int64_t i, int32_t key) {
  alignas(64) static constexpr int32_t kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const i32x16 element = add(load_i32(kLanes), set1(static_cast<int32_t>(i)));
  const i32x16 up = add(bits_of(value), shift_right<16>(random_bits(element, key)));
  return float_of(select(at_least(abs(value), set1(0.0f)), bit_and(up, set1(static_cast<int32_t>(0xffff0000))), bits_of(value)));
}

// Where the moments of a block are read and written as vectors: in place if they are floats, else decoded in L1.
template <StateFormat kFormat>
struct MomentMemory {
  static constexpr DType kDType = kFormat == StateFormat::bfloat16 ? DType::bfloat16 : DType::float32;
  void* values[kMaxMoments];
  i32x16 absmax[kMaxMoments];
};

template <StateFormat kFormat, class Rule>
LOWBIT_INLINE void step_vector(const OptimTensor& tensor, const Common& common, const Rule& rule, MomentMemory<kFormat>& memory, int64_t begin,
                               int64_t i, int64_t count, int32_t key) {
  f32x16 g = load_as_float(tensor.grad, tensor.grad_dtype, begin + i, count);
  f32x16 p = load_as_float(tensor.param, tensor.param_dtype, begin + i, count);
  if (common.scaled) {
    g = mul(g, common.grad_factor);
    store_from_float(tensor.grad, tensor.grad_dtype, begin + i, count, g);
  }
  if (common.negated) g = sub(set1(0.0f), g);
  if (common.adds_l2) g = fma(p, common.l2, g);
  if (common.decays) p = mul(p, common.keep);
  constexpr DType kDType = MomentMemory<kFormat>::kDType;
  const int64_t there = has_codes(kFormat) ? 16 : count;  // scratch is padded
  f32x16 moment[Rule::kMoments + 1];
  unroll<Rule::kMoments>([&](auto k) __attribute__((always_inline)) { moment[k] = load_as_float(memory.values[k], kDType, i, there); });
  p = rule.update(p, g, moment);
  unroll<Rule::kMoments>([&](auto k) __attribute__((always_inline)) {
    store_from_float(memory.values[k], kDType, i, there, moment[k]);
    if constexpr (has_codes(kFormat)) memory.absmax[k] = max(memory.absmax[k], bits_of(abs(moment[k])));
  });
  if (common.stochastic) p = round_stochastically(p, i, key);
  store_from_float(tensor.param, tensor.param_dtype, begin + i, count, p);
}

template <StateFormat kFormat, class Rule>
void step_block(const OptimArgs& args, const OptimTensor& tensor, const Common& common, const Rule& rule, int64_t block) {
  constexpr bool kCoded = has_codes(kFormat);
  constexpr int64_t kStride = kMaxStateBlock + 16;  // not a multiple of 4 KiB, or a load of one moment would wait for a store of another
  alignas(64) float decoded[kCoded ? Rule::kMoments * kStride + 1 : 1];
  const int64_t begin = block * args.block_size, left = tensor.numel - begin, count = left < args.block_size ? left : args.block_size;
  int32_t key = 0;
  if (common.stochastic)
    key = static_cast<int32_t>(philox4x32({static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), 0, 0},
                                          {static_cast<uint32_t>(tensor.seed), static_cast<uint32_t>(tensor.seed >> 32)})[0]);
  MomentMemory<kFormat> memory;
  unroll<Rule::kMoments>([&](auto k) __attribute__((always_inline)) {
    uint8_t* stored = static_cast<uint8_t*>(tensor.moment[k]) + state_bytes(kFormat, begin);
    memory.values[k] = kCoded ? static_cast<void*>(decoded + k * kStride) : stored;
    memory.absmax[k] = set1(0);
    if constexpr (kCoded) decode_block<kFormat, Rule::kSigned[k]>(stored, tensor.scale[k][block], count, decoded + k * kStride);
  });
  const int64_t whole = count / 16 * 16;
  for (int64_t i = 0; i < whole; i += 16) step_vector<kFormat>(tensor, common, rule, memory, begin, i, 16, key);
  if (whole < count) step_vector<kFormat>(tensor, common, rule, memory, begin, whole, count - whole, key);
  if constexpr (kCoded)
    unroll<Rule::kMoments>([&](auto k) __attribute__((always_inline)) {
      encode_block<kFormat, Rule::kSigned[k]>(decoded + k * kStride, memory.absmax[k], count,
                                              static_cast<uint8_t*>(tensor.moment[k]) + state_bytes(kFormat, begin), tensor.scale[k] + block);
    });
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
