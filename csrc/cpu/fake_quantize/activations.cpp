// SPDX-License-Identifier: Apache-2.0
// The row of the op fake_quantize_activations: x rounded as by the kernels of linear. A task is some rows.
#include LOWBIT_ISA_HEADER

#include "core/parallel.hpp"
#include "core/scratch.hpp"
#include "cpu/activation_codes.hpp"
#include "cpu/loops.hpp"
#include "cpu/rows.hpp"
#include "cpu/vector_io.hpp"
#include "ops/fake_quantize.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// Row `row` of x, padded with zeros to a whole vector.
void round_activations(const FakeQuantizeActivationsArgs& args, int64_t row, float* buffer) {
  const auto& [place, x_format, group_size, x, y] = args;
  const TensorView& out = y;  // clang 15 captures no structured binding
  const int64_t k = x.size(-1), padded = round_up(k, 16);
  for (int64_t i = 0; i < k; i += 16) store(buffer + i, load_as_float(x.data, x.dtype, row * k + i, k - i));
  auto put = [&](int64_t i, f32x16 value) { store_from_float(out.data, out.dtype, row * k + i, k - i, value); };
  if (x_format == XFormat::float8_row) {
    round_to_float8(buffer, padded);
    for (int64_t i = 0; i < k; i += 16) put(i, load(buffer + i));
    return;
  }
  const int64_t group = x_format == XFormat::int8_group && group_size ? group_size : padded;
  for (int64_t begin = 0; begin < k; begin += group) {
    const int64_t end = smaller(padded, begin + group);
    const Range range = x_format == XFormat::int8_row_asymmetric ? asymmetric_range(buffer, padded)
                                                                 : symmetric_range(buffer + begin, end - begin, 127.0f);
    const f32x16 scale = set1(range.scale), inverse = set1(range.inverse), zero_point = set1(range.zero_point);
    for (int64_t i = begin; i < end; i += 16)
      put(i, mul(sub(to_float(int8_codes(load(buffer + i), inverse, zero_point)), zero_point), scale));
  }
}

void run_fake_quantize_activations(const FakeQuantizeActivationsArgs& args) {
  const int64_t k = args.x.size(-1), numel = args.x.numel();
  const RowTiles tasks(numel / k, larger(1, kSerialProducts / 16 / k));
  parallel_for(tasks.count, threads_worth(8 * numel), [&](int64_t task) {
    const Scratch buffer(round_up(k, 16) * static_cast<int64_t>(sizeof(float)));
    for (int64_t row = tasks.begin(task); row < tasks.begin(task + 1); row++)
      round_activations(args, row, buffer.as<float>());
  });
}

constexpr Kernel<FakeQuantizeActivationsArgs> kRows[] = {{LOWBIT_ROW("fake_quantize_activations"),
                                                          never_refuses<FakeQuantizeActivationsArgs>,
                                                          run_fake_quantize_activations}};

}  // namespace

void fake_quantize_activations_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
