// SPDX-License-Identifier: Apache-2.0
// The row of the op all_finite: plain C++ reads at memory speed, so one instruction set serves all machines.
#include LOWBIT_ISA_HEADER

#include <atomic>

#include "core/parallel.hpp"
#include "cpu/rows.hpp"
#include "formats/format.hpp"
#include "ops/quantize.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

void run_all_finite(const AllFiniteArgs& args) {
  constexpr int64_t kBlock = 1 << 16;
  const TensorView& tensor = args.tensor;
  const int64_t count = tensor.numel();
  std::atomic<bool> finite{true};
  parallel_for(ceil_div(count, kBlock), threads_worth(4 * count), [&](int64_t block) {
    const int64_t begin = block * kBlock, end = begin + kBlock < count ? begin + kBlock : count;
    uint32_t bad = 0;  // nonzero after an exponent of all ones: inf or nan
    if (tensor.dtype == DType::float32) {
      for (int64_t i = begin; i < end; i++) bad |= (tensor.as<const uint32_t>()[i] & 0x7f800000u) == 0x7f800000u;
    } else {
      const uint16_t exponent = tensor.dtype == DType::bfloat16 ? 0x7f80u : 0x7c00u;
      for (int64_t i = begin; i < end; i++) bad |= (tensor.as<const uint16_t>()[i] & exponent) == exponent;
    }
    if (bad) finite.store(false, std::memory_order_relaxed);
  });
  *args.result = finite;
}

constexpr Kernel<AllFiniteArgs> kRows[] = {{LOWBIT_ROW("all_finite"), never_refuses<AllFiniteArgs>, run_all_finite}};

}  // namespace

void quantize_all_finite_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
