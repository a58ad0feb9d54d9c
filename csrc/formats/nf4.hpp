// SPDX-License-Identifier: Apache-2.0
// nf4 (Dettmers et al., QLoRA, arXiv 2305.14314): 4-bit codes of quantiles of the normal distribution. With
// probabilities p equally spaced from 0.9677083 (the mean of 1 - 1/30 and 1 - 1/32) to 0.5 exclusive, 8 are the
// positive levels and 7 the negative ones, ndtri(p) / ndtri(0.9677083); the sixteenth is 0. These are the float32
// values of bitsandbytes, which rounds p and ndtri(p) to float32 on the way: up to 2e-7 from the formula.
#pragma once

#include "formats/codec.hpp"

namespace lowbit {

namespace {
constexpr Levels kNf4Levels({-1.0f, -0.6961928f, -0.52507305f, -0.3949175f, -0.28444138f, -0.18477343f, -0.091050036f,
                             0.0f, 0.0795803f, 0.1609302f, 0.2461123f, 0.33791524f, 0.44070983f, 0.562617f, 0.72295684f,
                             1.0f});
}

struct Nf4 : LookupCodec<Nf4, 7> {
  static constexpr float range = 1;
  LOWBIT_INLINE static constexpr const Levels& levels() { return kNf4Levels; }
};

}  // namespace lowbit
