// SPDX-License-Identifier: Apache-2.0
// Runs the rows of attention by tiles through the emulated tile unit (emulated_amx.hpp), on any machine, and compares
// with the row `scalar`; and cuts every float16 into its parts. Started by tests/cpp/test_emulated_tiles.py; links
// liblowbit for everything but the unit and what it is compiled with.
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
  Heads(DType dtype, int64_t heads, int64_t rows, int64_t columns, std::mt19937& random)
      : bits(heads * rows * columns) {
    std::normal_distribution<float> normal;
    for (uint16_t& x : bits)
      x = dtype == DType::bfloat16 ? bfloat16_from_float(normal(random)) : float16_from_float(normal(random));
    view = {.data = bits.data(), .dtype = dtype, .rank = 4};
    view.shape = {1, heads, rows, columns}, view.stride = {heads * rows * columns, rows * columns, columns, 1};
  }
  Heads(const Heads&) = delete;
  float at(std::size_t i) const {
    return view.dtype == DType::bfloat16 ? float_from_bfloat16(bits[i]) : float_from_float16(bits[i]);
  }
};

TensorView numbers(std::vector<float>& values, std::vector<int64_t> shape) {
  TensorView v{.data = values.data(), .dtype = DType::float32, .rank = static_cast<int>(shape.size())};
  for (int64_t i = v.rank - 1, step = 1; i >= 0; step *= shape[i--]) v.shape[i] = shape[i], v.stride[i] = step;
  return v;
}

// Factors of 8 bits and sums of up to 300: 2^-6 of the largest value, of 11 bits 2^-9, which a lost tile or part is
// beyond.
bool close(const char* what, const Heads& wanted, const Heads& got) {
  float largest = 1, error = 0;
  for (std::size_t i = 0; i < got.bits.size(); i++) {
    const float a = wanted.at(i), b = got.at(i);
    largest = std::fmax(largest, std::fabs(a)), error = std::fmax(error, b == b ? std::fabs(a - b) : INFINITY);
  }
  if (error <= (got.view.dtype == DType::bfloat16 ? 0x1p-6f : 0x1p-9f) * largest) return true;
  std::printf("%s differs by %g of %g: ", what, error, largest);
  return false;
}

template <class Args, std::size_t count>
void run_emulated(const Kernel<Args> (&rows)[count], const Args& args) {
  for (const Kernel<Args>& row : rows)
    if (row.refuses(args).empty()) row.run(args);
}

bool as_scalar(DType dtype, int64_t group, int64_t length, int64_t keys, int64_t e, int64_t ev, bool causal,
               double dropout_p) {
  std::mt19937 random(static_cast<uint32_t>(length * 7919 + keys * 31 + e));
  const int64_t heads = 2 * group;
  const auto made = [&](int64_t heads, int64_t rows, int64_t columns) {
    return Heads(dtype, heads, rows, columns, random);
  };
  Heads q = made(heads, length, e), k = made(2, keys, e), v = made(2, keys, ev), grad = made(heads, length, ev);
  int64_t seed = 7;
  std::vector<float> lse(heads * length);
  AttentionForwardArgs args{.q = q.view, .k = k.view, .v = v.view, .lse = numbers(lse, {1, heads, length})};
  args.scale = 0.3, args.causal = causal, args.dropout_p = dropout_p;
  if (dropout_p > 0) args.seed = {.data = &seed, .dtype = DType::int64, .rank = 1}, args.seed.shape[0] = 1;
  Heads out = made(heads, length, ev), found = made(heads, length, ev);
  args.out = found.view, run_emulated(cpu::emulated::kForward, args);
  force_kernel("attention_forward_float32_scalar");
  args.out = out.view, attention_forward(args);

  Heads dq = made(heads, length, e), dk = made(2, keys, e), dv = made(2, keys, ev);
  Heads found_dq = made(heads, length, e), found_dk = made(2, keys, e), found_dv = made(2, keys, ev);
  AttentionBackwardArgs backward{{.grad_out = grad.view}, {}, args};
  backward.grad_q = found_dq.view, backward.grad_k = found_dk.view, backward.grad_v = found_dv.view;
  run_emulated(cpu::emulated::kBackward, backward);
  force_kernel("attention_backward_float32_scalar");
  backward.grad_q = dq.view, backward.grad_k = dk.view, backward.grad_v = dv.view;
  attention_backward(backward);
  if (close("out", out, found) && close("grad_q", dq, found_dq) && close("grad_k", dk, found_dk) &&
      close("grad_v", dv, found_dv))
    return true;
  std::printf("parts=%d group=%ld length=%ld keys=%ld e=%ld ev=%ld causal=%d dropout=%g\n",
              dtype == DType::bfloat16 ? 1 : 2, static_cast<long>(group),
              static_cast<long>(length), static_cast<long>(keys), static_cast<long>(e), static_cast<long>(ev), causal,
              dropout_p);
  return false;
}

// Every finite float16 is the sum of its two parts, none of them subnormal: as rows and as pairs of a tile of weights.
bool parts_are_exact() {
  using namespace cpu::emulated;
  alignas(64) uint16_t rows[2][32];
  for (uint32_t bits = 0; bits < 65536; bits++) {
    const float x = float_from_float16(static_cast<uint16_t>(bits));
    if (!std::isfinite(x)) continue;
    cut_rounded<2>(set1(x), set1(-x), reinterpret_cast<uint8_t*>(rows));
    i32x16 pairs[2];
    cut_rounded(set1(x), set1(-x), pairs);
    float sum = 0, paired = 0;
    for (int part = 0; part < 2; part++) {
      const float value = float_from_bfloat16(rows[part][0]);
      int32_t both[16];
      store_i32(both, pairs[part]);
      if (value != 0 && !std::isnormal(value)) return false;
      if (float_from_bfloat16(rows[part][16]) != -value) return false;
      sum += value, paired += float_from_bfloat16(static_cast<uint16_t>(both[0]));
      if (float_from_bfloat16(static_cast<uint16_t>(static_cast<uint32_t>(both[0]) >> 16)) != -value) return false;
    }
    if (sum != x || paired != x) return false;
  }
  return true;
}

int main() {
  bool same = parts_are_exact();
  if (!same) std::printf("a float16 is not the sum of its parts\n");
  int cases = 0;
  for (const auto& [dtype, group, length, keys] :
       {std::tuple{DType::bfloat16, 1, 17, 32}, {DType::bfloat16, 2, 33, 37}, {DType::bfloat16, 1, 70, 300},
        {DType::float16, 1, 33, 257}})
    for (const auto& [e, ev] : {std::pair{16, 16}, {40, 33}})
      for (const bool causal : {false, true}) {
        same &= as_scalar(dtype, group, length, keys, e, ev, causal, length == 33 ? 0.5 : 0.0);
        cases++;
      }
  std::printf("%d cases\n", cases);
  return same ? 0 : 1;
}
