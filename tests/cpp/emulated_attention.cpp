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
  Heads(const Heads&) = delete;
};

TensorView numbers(std::vector<float>& values, std::vector<int64_t> shape) {
  TensorView v{.data = values.data(), .dtype = DType::float32, .rank = static_cast<int>(shape.size())};
  for (int64_t i = v.rank - 1, step = 1; i >= 0; step *= shape[i--]) v.shape[i] = shape[i], v.stride[i] = step;
  return v;
}

// Factors of 8 bits and sums of up to 300: 2^-6 of the largest value, which a lost tile or part is beyond.
bool close(const char* what, const Heads& wanted, const Heads& got) {
  float largest = 1, error = 0;
  for (std::size_t i = 0; i < got.bits.size(); i++) {
    const float a = float_from_bfloat16(wanted.bits[i]), b = float_from_bfloat16(got.bits[i]);
    largest = std::fmax(largest, std::fabs(a)), error = std::fmax(error, b == b ? std::fabs(a - b) : INFINITY);
  }
  if (error <= 0x1p-6f * largest) return true;
  std::printf("%s differs by %g of %g: ", what, error, largest);
  return false;
}

template <class Args, std::size_t count>
void run_emulated(const Kernel<Args> (&rows)[count], const Args& args) {
  for (const Kernel<Args>& row : rows)
    if (row.refuses(args).empty()) row.run(args);
}

bool as_scalar(int64_t group, int64_t length, int64_t keys, int64_t e, int64_t ev, bool causal, double dropout_p) {
  std::mt19937 random(static_cast<uint32_t>(length * 7919 + keys * 31 + e));
  const int64_t heads = 2 * group;
  Heads q(heads, length, e, random), k(2, keys, e, random), v(2, keys, ev, random), grad(heads, length, ev, random);
  int64_t seed = 7;
  std::vector<float> lse(heads * length);
  AttentionForwardArgs args{.q = q.view, .k = k.view, .v = v.view, .lse = numbers(lse, {1, heads, length})};
  args.scale = 0.3, args.causal = causal, args.dropout_p = dropout_p;
  if (dropout_p > 0) args.seed = {.data = &seed, .dtype = DType::int64, .rank = 1}, args.seed.shape[0] = 1;
  Heads out(heads, length, ev, random), found(heads, length, ev, random);
  args.out = found.view, run_emulated(cpu::emulated::kForward, args);
  force_kernel("attention_forward_float32_scalar");
  args.out = out.view, attention_forward(args);

  Heads dq(heads, length, e, random), dk(2, keys, e, random), dv(2, keys, ev, random);
  Heads found_dq(heads, length, e, random), found_dk(2, keys, e, random), found_dv(2, keys, ev, random);
  AttentionBackwardArgs backward{.forward = args, .grad_out = grad.view};
  backward.grad_q = found_dq.view, backward.grad_k = found_dk.view, backward.grad_v = found_dv.view;
  run_emulated(cpu::emulated::kBackward, backward);
  force_kernel("attention_backward_float32_scalar");
  backward.grad_q = dq.view, backward.grad_k = dk.view, backward.grad_v = dv.view;
  attention_backward(backward);
  if (close("out", out, found) && close("grad_q", dq, found_dq) && close("grad_k", dk, found_dk) &&
      close("grad_v", dv, found_dv))
    return true;
  std::printf("group=%ld length=%ld keys=%ld e=%ld ev=%ld causal=%d dropout=%g\n", static_cast<long>(group),
              static_cast<long>(length), static_cast<long>(keys), static_cast<long>(e), static_cast<long>(ev), causal,
              dropout_p);
  return false;
}

int main() {
  bool same = true;
  int cases = 0;
  for (const auto& [group, length, keys] : {std::tuple{1, 17, 32}, {2, 33, 37}, {1, 70, 300}})
    for (const auto& [e, ev] : {std::pair{16, 16}, {40, 33}})
      for (const bool causal : {false, true}) {
        same &= as_scalar(group, length, keys, e, ev, causal, length == 33 ? 0.5 : 0.0);
        cases++;
      }
  std::printf("%d cases\n", cases);
  return same ? 0 : 1;
}
