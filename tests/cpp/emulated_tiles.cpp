// SPDX-License-Identifier: Apache-2.0
// Runs a unit of linear, gather_linear and experts through a scalar emulation of the trait that it is written
// against, on any machine, and compares with the row `scalar`: every bit where activations are int8, else to the
// error of sums in float32. Started by tests/cpp/test_emulated_tiles.py, which says the unit (LOWBIT_UNIT), the
// function with its rows (LOWBIT_UNIT_ROWS) and the emulation (LOWBIT_ISA_HEADER); links liblowbit for everything but
// the kernels under test.
#include LOWBIT_UNIT

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "ops/linear.hpp"
#include "ops/quantize.hpp"

using namespace lowbit;

TensorView view(void* data, DType dtype, std::vector<int64_t> shape) {
  TensorView v{.data = data, .dtype = dtype, .rank = static_cast<int>(shape.size())};
  for (int64_t i = v.rank - 1, step = 1; i >= 0; step *= shape[i--]) v.shape[i] = shape[i], v.stride[i] = step;
  return v;
}

const Backend& unit() {
  static const Backend unit = [] {
    Backend backend{.name = "emulated", .device = DeviceType::cpu, .unavailable = nullptr};
    cpu::emulated::LOWBIT_UNIT_ROWS(backend);
    return backend;
  }();
  return unit;
}

// y of the unit's row of gather_linear for three copies of a weight, of which two have rows.
std::vector<float> gathered(const LinearTensors& tensors, const WeightSpec& spec, XFormat x_format) {
  const int64_t m = tensors.x.size(0), bytes = spec.panels() * spec.panel_bytes();
  std::vector<uint8_t> weights;
  std::vector<float> biases, y(m * spec.n, -1.0f);
  for (int e = 0; e < 3; e++) {
    weights.insert(weights.end(), tensors.weight.as<uint8_t>(), tensors.weight.as<uint8_t>() + bytes);
    biases.insert(biases.end(), tensors.bias.as<float>(), tensors.bias.as<float>() + spec.n);
  }
  std::vector<int64_t> index(m);
  for (int64_t row = 0; row < m; row++) index[row] = row % 5 ? 0 : 2;
  GatherLinearArgs args =
      gather_linear_args({.weight_spec = spec,
                          .x = tensors.x,
                          .weight = view(weights.data(), DType::uint8, {3, spec.panels(), spec.panel_bytes()}),
                          .index = view(index.data(), DType::int64, {m, 1}),
                          .bias = view(biases.data(), DType::float32, {3, spec.n})},
                         static_cast<int64_t>(x_format));
  args.y = view(y.data(), DType::float32, {m, 1, spec.n});
  for (const Kernel<GatherLinearArgs>& row : unit().gather_linear)
    if (row.refuses(args).empty()) row.run(args);
  return y;
}

// Three experts without a gate: `tensors` is the first product, and its weight as the rows lie the second one.
bool experts_are_same(const LinearTensors& tensors, const WeightSpec& spec, XFormat x_format, std::vector<float> w) {
  const int64_t m = tensors.x.size(0), bytes = spec.panels() * spec.panel_bytes();
  for (float& value : w) value /= 16;
  const WeightSpec second{spec.format, spec.k, spec.n, spec.group_size, spec.asymmetric};
  const int64_t second_bytes = second.panels() * second.panel_bytes();
  std::vector<uint8_t> gate, down(3 * second_bytes);
  for (int e = 0; e < 3; e++) {
    gate.insert(gate.end(), tensors.weight.as<uint8_t>(), tensors.weight.as<uint8_t>() + bytes);
    quantize(view(w.data(), DType::float32, {spec.k, spec.n}),
             view(down.data() + e * second_bytes, DType::uint8, {second.panels(), second.panel_bytes()}), second,
             static_cast<int64_t>(spec.asymmetric ? Mapping::asymmetric : Mapping::symmetric));
  }
  std::vector<int64_t> index(2 * m);
  std::vector<float> weights(2 * m), expected(m * second.n), got(m * second.n, -1.0f);
  for (int64_t t = 0; t < m; t++) {
    index[2 * t] = t % 5 ? 0 : 2, index[2 * t + 1] = t % 3 ? 3 : 1;  // 3 is no expert
    weights[2 * t] = 0.75f, weights[2 * t + 1] = static_cast<float>(t % 7) / 8;
  }
  const auto packed = [](std::vector<uint8_t>& data, const WeightSpec& of) {
    return view(data.data(), DType::uint8, {3, of.panels(), of.panel_bytes()});
  };
  ExpertsArgs args = experts_args({.x = tensors.x,
                                   .gate_up = {.spec = spec, .packed = packed(gate, spec)},
                                   .down = {.spec = second, .packed = packed(down, second)},
                                   .index = view(index.data(), DType::int64, {m, 2}),
                                   .weights = view(weights.data(), DType::float32, {m, 2}),
                                   .gate = {.gated = false}},
                                  static_cast<int64_t>(x_format), static_cast<int64_t>(x_format),
                                  static_cast<int64_t>(ExpertActivation::silu));
  const bool float_x = x_format == XFormat::floating;
  args.y = view(expected.data(), DType::float32, {m, second.n});
  force_kernel(float_x ? "experts_scalar" : "experts_int8_scalar");
  run(args);
  args.y.data = got.data();
  for (const Kernel<ExpertsArgs>& row : unit().experts)
    if (row.refuses(args).empty()) row.run(args);
  return std::equal(expected.begin(), expected.end(), got.begin(),
                    [&](float a, float b) { return float_x ? std::abs(a - b) < 2e-3f : a == b; });
}

bool as_scalar(int64_t m, int64_t n, int64_t k, Format format, int64_t group_size, bool asymmetric, XFormat x_format) {
  std::mt19937 generator(static_cast<uint32_t>(m * 7919 + n * 31 + k));
  std::normal_distribution<float> normal;
  std::vector<float> w(n * k), x(m * k), bias(n), expected(m * n), got(m * n, -1.0f);
  for (auto* values : {&w, &x, &bias})
    for (float& value : *values) value = normal(generator);
  const WeightSpec spec = weight_spec("test", n, k, static_cast<int64_t>(format), group_size, asymmetric);
  std::vector<uint8_t> packed(spec.panels() * spec.panel_bytes());
  LinearTensors tensors{.x = view(x.data(), DType::float32, {m, k}),
                        .weight = view(packed.data(), DType::uint8, {spec.panels(), spec.panel_bytes()}),
                        .bias = view(bias.data(), DType::float32, {n}),
                        .mul = {},
                        .add = {},
                        .y = view(expected.data(), DType::float32, {m, n})};
  quantize(view(w.data(), DType::float32, {n, k}), tensors.weight, spec,
           static_cast<int64_t>(asymmetric ? Mapping::asymmetric : Mapping::symmetric));
  const bool float_x = x_format == XFormat::floating;
  force_kernel(concat("linear_", kFormatNames[static_cast<int>(format)], float_x ? "_scalar" : "_int8_scalar"));
  run(linear_args(tensors, spec, static_cast<int64_t>(x_format), static_cast<int64_t>(Activation::silu)));
  tensors.y.data = got.data();
  const LinearArgs args =
      linear_args(tensors, spec, static_cast<int64_t>(x_format), static_cast<int64_t>(Activation::silu));
  for (const Kernel<LinearArgs>& row : unit().linear)
    if (row.refuses(args).empty()) row.run(args);
  // Up to 257 products of normal numbers: two orders of float32 sums differ by 5e-5, a lost part of a factor is 1e-2.
  const auto same = [&](float a, float b) { return float_x ? std::abs(a - b) < 2e-4f : a == b; };
  const bool linear_is_same = std::equal(expected.begin(), expected.end(), got.begin(), same);
  tensors.y.data = expected.data();
  run(linear_args(tensors, spec, static_cast<int64_t>(x_format), static_cast<int64_t>(Activation::none)));
  const std::vector<float> of_gather = gathered(tensors, spec, x_format);
  const bool gather_is_same = std::equal(expected.begin(), expected.end(), of_gather.begin(), same);
  if (linear_is_same && gather_is_same && experts_are_same(tensors, spec, x_format, w)) return true;
  std::printf("differs: m=%ld n=%ld k=%ld format=%d group_size=%ld asymmetric=%d x_format=%d\n", static_cast<long>(m),
              static_cast<long>(n), static_cast<long>(k), static_cast<int>(format), static_cast<long>(group_size),
              asymmetric, static_cast<int>(x_format));
  return false;
}

int main() {
  bool same = true;
  int cases = 0;
  for (const int64_t m : LOWBIT_UNIT_M)
    for (const auto& [n, k] : {std::pair{16, 64}, {33, 100}, {70, 257}})
      for (const Format format : {Format::int8, Format::int4})
        for (const int64_t group_size : {0, 32, 128})
          for (const bool asymmetric : {false, true})
            for (const XFormat x_format : LOWBIT_UNIT_X_FORMATS) {
              same &= as_scalar(m, n, k, format, group_size, asymmetric, x_format);
              cases++;
            }
  for (const int64_t m : LOWBIT_UNIT_M)
    for (const XFormat x_format : LOWBIT_UNIT_X_FORMATS)
      for (const Format format : {Format::float32, Format::bfloat16, Format::float16}) {
        // Activations of float weights are float; float32 has a row of tiles from 64 rows on.
        if (x_format != XFormat::floating || m < 64) continue;
        same &= as_scalar(m, 33, 100, format, 0, false, x_format);
        cases++;
      }
  std::printf("%d cases\n", cases);
  return same ? 0 : 1;
}
