// SPDX-License-Identifier: Apache-2.0
// One block of one tensor: gradient, rule and rounding of the parameter in one pass over memory, 16 elements at a time in registers. The new moments
// wait in L1 until the block's largest is known, then become codes: p, g and the codes are read once and written once.
#pragma once

#include <utility>

#include "core/random.hpp"
#include "cpu/optim/moment.hpp"
#include "ops/optim.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

template <StateFormat kFormat, class Rule, int k>
struct MomentAt {
  Moment<kFormat, Rule::kSigned[k]> moment;
  LOWBIT_INLINE MomentAt(const OptimTensor& tensor, int64_t begin, int64_t block, float* values)
      : moment(tensor.moment[k], has_codes(kFormat) ? tensor.scale[k] + block : nullptr, begin, has_codes(kFormat) ? values + k * kMaxStateBlock : nullptr) {}
};

// The moments of a rule, each with its own map.
template <StateFormat kFormat, class Rule, class = std::make_integer_sequence<int, Rule::kMoments>>
struct Moments;
template <StateFormat kFormat, class Rule, int... k>
struct Moments<kFormat, Rule, std::integer_sequence<int, k...>> : MomentAt<kFormat, Rule, k>... {
  LOWBIT_INLINE Moments([[maybe_unused]] const OptimTensor& tensor, [[maybe_unused]] int64_t begin, [[maybe_unused]] int64_t block,
                        [[maybe_unused]] float* values)
      : MomentAt<kFormat, Rule, k>(tensor, begin, block, values)... {}
  template <class F>
  LOWBIT_INLINE void for_each(F&& f) {
    (f(std::integral_constant<int, k>{}, static_cast<MomentAt<kFormat, Rule, k>&>(*this).moment), ...);
  }
};

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

template <StateFormat kFormat, class Rule>
LOWBIT_INLINE void step_vector(const OptimTensor& tensor, const Common& common, const Rule& rule, Moments<kFormat, Rule>& moments, int64_t begin,
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
  f32x16 values[Rule::kMoments + 1];
  moments.for_each([&](auto k, auto& moment) { values[k] = moment.read(i, count); });
  p = rule.update(p, g, values);
  moments.for_each([&](auto k, auto& moment) { moment.put(i, count, values[k]); });
  if (common.stochastic) p = round_stochastically(p, i, key);
  store_from_float(tensor.param, tensor.param_dtype, begin + i, count, p);
}

template <StateFormat kFormat, class Rule>
void step_block(const OptimArgs& args, const OptimTensor& tensor, const Common& common, const Rule& rule, int64_t block) {
  alignas(64) float values[has_codes(kFormat) ? Rule::kMoments * kMaxStateBlock + 1 : 1];
  const int64_t begin = block * args.block_size, left = tensor.numel - begin, count = left < args.block_size ? left : args.block_size;
  int32_t key = 0;
  if (common.stochastic)
    key = static_cast<int32_t>(philox4x32({static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), 0, 0},
                                          {static_cast<uint32_t>(tensor.seed), static_cast<uint32_t>(tensor.seed >> 32)})[0]);
  Moments<kFormat, Rule> moments(tensor, begin, block, values);
  const int64_t whole = count / 16 * 16;
  for (int64_t i = 0; i < whole; i += 16) step_vector<kFormat>(tensor, common, rule, moments, begin, i, 16, key);
  if (whole < count) step_vector<kFormat>(tensor, common, rule, moments, begin, whole, count - whole, key);
  moments.for_each([&](auto, auto& moment) { moment.finish(count); });
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
