// SPDX-License-Identifier: Apache-2.0
// The row of the op rms_norm. A task is some rows of x; each is read twice, the second time from cache.
#include LOWBIT_ISA_HEADER

#include "ops/rms_norm.hpp"

#include "core/parallel.hpp"
#include "cpu/loops.hpp"
#include "cpu/root_mean_square.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

void normalize(const RmsNormArgs& args, int64_t row) {
  const TensorView &x = args.x, &weight = args.weight, &term = args.add, &y = args.y;
  const int64_t n = x.size(-1), begin = row * n;
  const f32x16 scale = reciprocal_root_mean_square(x.data, x.dtype, begin, n, args.eps);
  const f32x16 offset = set1(static_cast<float>(args.offset));
  for (int64_t i = 0; i < n; i += 16) {
    const f32x16 value = mul(load_as_float(x.data, x.dtype, begin + i, n - i), scale);
    const f32x16 factor = add(load_as_float(weight.data, weight.dtype, i, n - i), offset);
    const f32x16 result =
        term ? fma(value, factor, load_as_float(term.data, term.dtype, begin + i, n - i)) : mul(value, factor);
    store_from_float(y.data, y.dtype, begin + i, n - i, result);
  }
}

void run_rms_norm(const RmsNormArgs& args) {
  const int64_t n = args.x.size(-1), numel = args.x.numel();
  const RowTiles tasks(numel / n, larger(1, kSerialProducts / 16 / n));
  parallel_for(tasks.count, threads_worth(numel), [&](int64_t task) {
    for (int64_t row = tasks.begin(task); row < tasks.begin(task + 1); row++) normalize(args, row);
  });
}

constexpr Kernel<RmsNormArgs> kRows[] = {{LOWBIT_ROW("rms_norm"), never_refuses<RmsNormArgs>, run_rms_norm}};

}  // namespace

void rms_norm_rms_norm_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
