// SPDX-License-Identifier: Apache-2.0
// The step of time of a token in a state space model, delta = clamp(f(dt + dt_bias), dt_min, dt_max), and its gradient.
#pragma once

#include "cpu/recurrent/softplus.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// delta from dt + dt_bias.
template <class Args>
LOWBIT_INLINE f32x16 delta_of(const Args& args, f32x16 speed) {
  const f32x16 least = set1(static_cast<float>(args.dt_min)), most = set1(static_cast<float>(args.dt_max));
  return min(max(args.softplus ? softplus(speed) : speed, least), most);
}

// The gradient of dt + dt_bias from that of delta: 0 where delta is limited.
template <class Args>
LOWBIT_INLINE f32x16 of_speed(const Args& args, f32x16 speed, f32x16 of_delta) {
  const f32x16 least = set1(static_cast<float>(args.dt_min)), most = set1(static_cast<float>(args.dt_max));
  const f32x16 delta = args.softplus ? softplus(speed) : speed;
  const f32x16 grad = args.softplus ? mul(of_delta, sigmoid(speed)) : of_delta;
  const i32x16 is_between = bit_and(at_least(delta, least), at_least(most, delta));
  return float_of(select(is_between, bits_of(grad), set1(int32_t{0})));
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
