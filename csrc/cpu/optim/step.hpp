// SPDX-License-Identifier: Apache-2.0
// The blocks of one tensor: decode, rule and rounding of the parameter in one pass over memory, 32 elements at a time
// in registers. New moments stay in L1 until the block's largest is known, then become codes; p, g and the codes are
// read once and written once.
#pragma once

#include <type_traits>
#include <utility>

#include "core/random.hpp"
#include "core/arena.hpp"
#include "core/scratch.hpp"
#include "cpu/optim/correction.hpp"
#include "cpu/optim/moment.hpp"
#include "cpu/loops.hpp"
#include "ops/optim.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

LOWBIT_INLINE float grad_scale_of(const OptimStepArgs& args) { return args.grad_scale ? *args.grad_scale : 1.0f; }

// Constants for all blocks of a tensor.
struct TensorConstants {
  double step;  // step count, from 1 on
  uint64_t seed;
  uint8_t* corrections;  // null: none
  i32x16 thresholds;     // of their rounding
  f32x16 grad_factor, keep, l2;  // keep: 1 - lr * weight_decay if decoupled, else 1; l2: weight_decay if not decoupled
  bool scaled, negated, adds_l2, special, stochastic;  // special: any of the first three

  LOWBIT_INLINE TensorConstants(const OptimStepArgs& args, const OptimTensor& tensor)
      : step(*tensor.step_count),
        seed(args.stochastic_rounding ? tensor_seed(args.seed, step, &tensor - args.tensors.data()) : 0),
        corrections(args.corrections.empty() ? nullptr : args.corrections[&tensor - args.tensors.data()]),
        thresholds(cpu::LOWBIT_ISA_NAME::thresholds(step)),
        grad_factor(set1(1.0f / grad_scale_of(args))),
        keep(set1(static_cast<float>(args.hyper.decoupled ? 1 - args.hyper.lr * args.hyper.weight_decay : 1.0))),
        l2(set1(static_cast<float>(args.hyper.weight_decay))), scaled(grad_scale_of(args) != 1.0f),
        negated(args.hyper.maximize), adds_l2(args.hyper.weight_decay != 0 && !args.hyper.decoupled),
        special(scaled || negated || adds_l2),
        stochastic(args.stochastic_rounding && tensor.param_dtype == DType::bfloat16) {}
};

// Rounds up to bfloat16 with a probability equal to the fraction cut off; inf and nan stay.
LOWBIT_INLINE f32x16 round_stochastically(f32x16 value, int64_t i, int32_t key) {
  alignas(64) static constexpr int32_t kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const i32x16 element = add(load_i32(kLanes), set1(static_cast<int32_t>(i)));
  const i32x16 up = add(bits_of(value), shift_right<16>(random_bits(element, key)));
  return float_of(
      select(at_least(abs(value), set1(0.0f)), bit_and(up, set1(static_cast<int32_t>(0xffff0000))), bits_of(value)));
}

// The moments of a block: as stored, and, if they are codes, the new values in L1, in the rule's units, with the bits
// of the largest.
template <StateFormat kFormat, class Rule>
struct BlockOfMoments {
  static constexpr DType kDType = kFormat == StateFormat::bfloat16 ? DType::bfloat16 : DType::float32;
  // Not a multiple of 4 KiB, or a load of one moment would wait for a store of another.
  static constexpr int64_t kStride = kMaxStateBlock + 16;

  int64_t begin, count;
  uint8_t* stored[kMaxMoments];
  float* scale[kMaxMoments];
  float* values;
  i32x16 absmax[kMaxMoments];

  LOWBIT_INLINE void start(const OptimTensor& tensor, int64_t block, int64_t block_size, float* scratch) {
    begin = block * block_size;
    count = tensor.numel - begin < block_size ? tensor.numel - begin : block_size;
    values = scratch;
    unroll<Rule::kMoments>([&](auto k) __attribute__((always_inline)) {
      stored[k] = static_cast<uint8_t*>(tensor.moment[k]) + state_bytes(kFormat, begin);
      scale[k] = has_codes(kFormat) ? tensor.scale[k] + block : nullptr;
    });
  }
  // Reads the old values of each moment, times the rule's factor (carry).
  template <int k>
  struct Decoder {
    using Codes = StateCodes<has_codes(kFormat) ? kFormat : StateFormat::dynamic8, Rule::template kSigned<k>>;
    std::conditional_t<has_codes(kFormat), typename Codes::Decoder, f32x16> decode;
  };
  template <class> struct AllDecoders;
  template <int... k>
  struct AllDecoders<std::integer_sequence<int, k...>> : Decoder<k>... {
    LOWBIT_INLINE AllDecoders(const BlockOfMoments& block, const Rule& rule)
        : Decoder<k>{block.template decoder<k>(rule.carry[k])}... {}
  };
  using Decoders = AllDecoders<std::make_integer_sequence<int, Rule::kMoments>>;

  template <int k>
  LOWBIT_INLINE Decoder<k> decoder(float carry) const {
    if constexpr (has_codes(kFormat)) return {typename Decoder<k>::Codes::Decoder(*scale[k] * carry)};
    else return {set1(carry)};
  }
  // 32 old values of moment k times factor, with zeros after the first `left`.
  template <int k>
  LOWBIT_INLINE void read(const Decoders& decoders, int64_t i, int64_t left, f32x16 (&value)[2],
                          f32x16 (&factor)[2]) const {
    const auto& decode = static_cast<const Decoder<k>&>(decoders).decode;
    if constexpr (has_codes(kFormat))
      return decode_group<kFormat>(decode, stored[k] + state_bytes(kFormat, i), left, value, factor);
    else
      unroll<2>([&](auto half) __attribute__((always_inline)) {
        value[half] = load_as_float(stored[k], kDType, i + 16 * half, left - 16 * half), factor[half] = decode;
      });
  }
  template <int k>
  LOWBIT_INLINE void put(int64_t i, int64_t left, f32x16 value, float unit) {
    if constexpr (has_codes(kFormat)) store(values + k * kStride + i, value);
    else store_from_float(stored[k], kDType, i, left, mul(value, set1(unit)));
  }
  LOWBIT_INLINE void encode(const Rule& rule) const {
    unroll<Rule::kMoments>([&](auto k) __attribute__((always_inline)) {
      encode_block<kFormat, Rule::template kSigned<k>>(absmax[k], rule.unit[k], count, values + k * kStride, stored[k],
                                              scale[k]);
    });
  }
};

// The larger bits of |value|: nan above inf. A moment that cannot be negative may still be a negative nan, whose bits
// exceed all others if unsigned.
template <bool kSigned>
LOWBIT_INLINE i32x16 larger(i32x16 bits, f32x16 value) {
  return kSigned ? max(bits, bits_of(abs(value))) : max_u32(bits, bits_of(value));
}

// DType::other: known at run time only.
constexpr DType known(DType fixed, DType given) { return fixed == DType::other ? given : fixed; }

// 32 elements of a block from `i` on, of which `left` exist.
template <StateFormat kFormat, class Rule, DType kParam, DType kGrad>
struct GroupUpdate {
  using Moments = BlockOfMoments<kFormat, Rule>;
  using Decoders = typename Moments::Decoders;
  static constexpr int kMoments = Rule::kMoments;

  const OptimTensor& tensor;
  const TensorConstants& constants;
  const Rule& rule;
  char *params, *grads;  // addresses of the block
  int32_t key;           // key of stochastic rounding
  uint8_t* corrections;  // of the block's parameters; null: none

  LOWBIT_INLINE DType param_dtype() const { return known(kParam, tensor.param_dtype); }
  LOWBIT_INLINE DType grad_dtype() const { return known(kGrad, tensor.grad_dtype); }

  LOWBIT_INLINE void operator()(Moments& moments, const Decoders& decoders, i32x16 (&absmax)[kMoments + 1], int64_t i,
                                int64_t left) const {
    f32x16 old[kMoments + 1][2], factors[kMoments + 1][2];
    unroll<kMoments>([&](auto k) __attribute__((always_inline)) {
      moments.template read<k>(decoders, i, left, old[k], factors[k]);
    });
    unroll<2>([&](auto half) __attribute__((always_inline)) {
      const int64_t at = i + 16 * half, lanes = left - 16 * half;
      f32x16 g = load_as_float(grads, grad_dtype(), at, lanes), p = load_as_float(params, param_dtype(), at, lanes);
      if (corrections) p = with_correction(p, corrections + at, lanes);
      if (constants.special) {
        g = mul(g, constants.grad_factor);
        if (constants.scaled) store_from_float(grads, grad_dtype(), at, lanes, g);
        if (constants.negated) g = sub(set1(0.0f), g);
        if (constants.adds_l2) g = fma(p, constants.l2, g);
      }
      f32x16 moment[kMoments + 1], factor[kMoments + 1];
      unroll<kMoments>([&](auto k)
                           __attribute__((always_inline)) { moment[k] = old[k][half], factor[k] = factors[k][half]; });
      p = rule.update(p, constants.keep, g, moment, factor);
      unroll<kMoments>([&](auto k) __attribute__((always_inline)) {
        moments.template put<k>(at, lanes, moment[k], rule.unit[k]);
        if constexpr (has_codes(kFormat)) absmax[k] = larger<Rule::template kSigned<k>>(absmax[k], moment[k]);
      });
      if (constants.stochastic) p = round_stochastically(p, at, key);
      if (corrections)
        store_corrected(reinterpret_cast<uint16_t*>(params) + at, corrections + at, lanes, p, constants.thresholds);
      else store_from_float(params, param_dtype(), at, lanes, p);
    });
  }
};

// Any dtypes, and the tail of a block: one copy per format and rule.
template <StateFormat kFormat, class Rule>
[[gnu::noinline]] void update_some(const GroupUpdate<kFormat, Rule, DType::other, DType::other>& update,
                                   BlockOfMoments<kFormat, Rule>& moments,
                                   const typename BlockOfMoments<kFormat, Rule>::Decoders& decoders,
                                   i32x16 (&absmax)[Rule::kMoments + 1], int64_t i, int64_t left) {
  update(moments, decoders, absmax, i, left);
}

template <StateFormat kFormat, class Rule, DType kParam, DType kGrad>
void update_block(const OptimStepArgs& args, const OptimTensor& tensor, const TensorConstants& constants,
                  const Rule& rule, BlockOfMoments<kFormat, Rule>& moments) {
  constexpr int kMoments = Rule::kMoments;
  constexpr int64_t kPrefetchBytes = 4096;
  constexpr bool kKnown = kParam != DType::other && kGrad != DType::other;
  const int64_t param_size = static_cast<int64_t>(size_of(known(kParam, tensor.param_dtype)));
  const int64_t grad_size = static_cast<int64_t>(size_of(known(kGrad, tensor.grad_dtype)));
  const GroupUpdate<kFormat, Rule, kParam, kGrad> update{
      .tensor = tensor,
      .constants = constants,
      .rule = rule,
      .params = static_cast<char*>(tensor.param) + moments.begin * param_size,
      .grads = static_cast<char*>(tensor.grad) + moments.begin * grad_size,
      .key = constants.stochastic ? block_key(constants.seed, moments.begin / args.block_size) : 0,
      .corrections = constants.corrections ? constants.corrections + moments.begin : nullptr};
  const typename BlockOfMoments<kFormat, Rule>::Decoders decoders(moments, rule);
  i32x16 absmax[kMoments + 1];
  for (i32x16& bits : absmax) bits = set1(0);
  int64_t i = 0;
  if constexpr (kKnown)
    for (; i + kGroup <= moments.count; i += kGroup) {
      unroll<2>([&](auto half) __attribute__((always_inline)) {
        __builtin_prefetch(update.params + (i + 16 * half) * param_size + kPrefetchBytes, 1);
        __builtin_prefetch(update.grads + (i + 16 * half) * grad_size + kPrefetchBytes);
      });
      update(moments, decoders, absmax, i, kGroup);
    }
  if (i < moments.count) {
    const GroupUpdate<kFormat, Rule, DType::other, DType::other> any{tensor,        constants,       rule,
                                                                     update.params, update.grads, update.key,
                                                                     update.corrections};
    const auto any_decoders = decoders;  // a copy with other addresses: the loop's decoders stay in registers
    i32x16 any_absmax[kMoments + 1];
    for (int k = 0; k <= kMoments; k++) any_absmax[k] = absmax[k];
    for (; i < moments.count; i += kGroup)
      update_some<kFormat, Rule>(any, moments, any_decoders, any_absmax, i, moments.count - i);
    for (int k = 0; k <= kMoments; k++) absmax[k] = any_absmax[k];
  }
  unroll<kMoments>([&](auto k)
                       __attribute__((always_inline)) { moments.absmax[k] = bit_and(absmax[k], set1(INT32_MAX)); });
}

// Blocks [first, end) of a tensor. A block is encoded after the next one is updated: by then its largest is known,
// while encoding it at once would wait for the last elements' latency of 100 cycles.
template <StateFormat kFormat, class Rule, DType kParam, DType kGrad>
void step_blocks(const OptimStepArgs& args, const OptimTensor& tensor, int64_t first, int64_t end) {
  using Block = BlockOfMoments<kFormat, Rule>;
  constexpr int64_t kFloats = has_codes(kFormat) ? Rule::kMoments * Block::kStride : 0;
  const Scratch memory(2 * kFloats * static_cast<int64_t>(sizeof(float)));
  float* const values = memory.as<float>();
  if constexpr (kRedZones)
    for (int64_t i = 0; i < 2 * kFloats; i += Block::kStride)
      LOWBIT_FORBID(values + i + args.block_size,
                    (Block::kStride - args.block_size) * static_cast<int64_t>(sizeof(float)));
  const TensorConstants constants(args, tensor);
  const Rule rule(args.hyper, constants.step);
  Block moments, previous;
  for (int64_t block = first; block < end; block++) {
    moments.start(tensor, block, args.block_size, values + (block & 1) * kFloats);
    update_block<kFormat, Rule, kParam, kGrad>(args, tensor, constants, rule, moments);
    if constexpr (has_codes(kFormat)) {
      if (block > first) previous.encode(rule);
      previous = moments;
    }
  }
  if constexpr (has_codes(kFormat)) previous.encode(rule);
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
