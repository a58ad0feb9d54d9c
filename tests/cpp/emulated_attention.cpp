// SPDX-License-Identifier: Apache-2.0
// Runs the rows of attention by tiles through the emulated tile unit (emulated_amx.hpp), on any machine, and compares
// with the row `scalar`. Started by tests/cpp/test_emulated_tiles.py; links liblowbit for everything but the unit and
// what it is compiled with.
#include "cpu/attention/amx.cpp"

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "core/dtype.hpp"

using namespace lowbit;

struct Heads {
  std::vector<uint16_t> bits;
  TensorView view;
  Heads(int64_t heads, int64_t rows, int64_t columns, std::mt19937& random) : bits(heads * rows * columns) {
    std::normal_distribution<float> normal;
    for (uint16_t& x : bits) x = bfloat16_from_float(normal(random));
    view = {.data = bits.data(), .dtype = DType::bfloat16, .rank = 4};
    view.shape = {1, heads, rows, columns}, view.stride = {heads * rows * columns, rows * columns, columns, 1};
  }
};

// Probabilities and results of 8 bits, 2^-9 of either, of values that are below 4, doubled by dropout.
constexpr float kTolerance = 8 * 0x1p-8f;

bool as_scalar(int64_t group, int64_t length, int64_t keys, int64_t e, int64_t ev, bool causal, double dropout_p) {
  std::mt19937 random(static_cast<uint32_t>(length * 7919 + keys * 31 + e));
  const int64_t heads = 2 * group;
  Heads q(heads, length, e, random), k(2, keys, e, random), v(2, keys, ev, random), wanted(heads, length, ev, random);
  Heads got = wanted;
  got.view.data = got.bits.data();
  int64_t seed = 7;
  AttentionForwardArgs args{.q = q.view, .k = k.view, .v = v.view, .out = wanted.view};
  args.scale = 0.3, args.causal = causal, args.dropout_p = dropout_p;
  if (dropout_p > 0) args.seed = {.data = &seed, .dtype = DType::int64, .rank = 1}, args.seed.shape[0] = 1;
  force_kernel("attention_forward_float32_scalar");
  attention_forward(args);
  args.out = got.view;
  for (const Kernel<AttentionForwardArgs>& row : cpu::emulated::kForward)
    if (row.refuses(args).empty()) row.run(args);
  for (std::size_t i = 0; i < got.bits.size(); i++) {
    const float a = float_from_bfloat16(wanted.bits[i]), b = float_from_bfloat16(got.bits[i]);
    if (std::abs(a - b) <= kTolerance) continue;
    std::printf("differs at %zu, %g and %g: group=%ld length=%ld keys=%ld e=%ld ev=%ld causal=%d dropout=%g\n", i, a, b,
                static_cast<long>(group), static_cast<long>(length), static_cast<long>(keys), static_cast<long>(e),
                static_cast<long>(ev), causal, dropout_p);
    return false;
  }
  return true;
}

int main() {
  bool same = true;
  int cases = 0;
  for (const auto& [group, length, keys] : {std::tuple{1, 17, 5}, {2, 33, 31}, {1, 70, 300}})
    for (const auto& [e, ev] : {std::pair{16, 16}, {40, 33}})
      for (const bool causal : {false, true}) {
        same &= as_scalar(group, length, keys, e, ev, causal, length == 33 ? 0.5 : 0.0);
        cases++;
      }
  std::printf("%d cases\n", cases);
  return same ? 0 : 1;
}
