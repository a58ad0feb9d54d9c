// SPDX-License-Identifier: Apache-2.0
// The trait of avx512_vnni in plain C++: the scalar vector with its tile sizes, its independent sums and its unsigned
// int8 codes.
#pragma once

#define kDotRows kScalarDotRows
#define kDotPanels kScalarDotPanels
#define Dot4 ScalarDot4
#define Dot8 ScalarDot8
#include "cpu/simd/scalar.hpp"
#undef kDotRows
#undef kDotPanels
#undef Dot4
#undef Dot8

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

struct Dot4 : ScalarDot4 {
  static constexpr int kChains = 4;
};
struct Dot8 : ScalarDot8 {
  static constexpr int kChains = 4;
};
constexpr int kDotRows = 6, kDotPanels = 2;

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
