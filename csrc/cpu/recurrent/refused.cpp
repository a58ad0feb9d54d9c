// SPDX-License-Identifier: Apache-2.0
#include "cpu/recurrent/refused.hpp"

#include <atomic>

#include "core/parallel.hpp"
#include "cpu/recurrent/sequences.hpp"
#include "cpu/row_begin.hpp"

namespace lowbit::cpu {

namespace {

// Values that a tensor may have: finite ones, or of these only those up to 0.
enum class Wanted { finite, decay };

// Has its sign bit set for values that are not wanted, which are found by their bits.
template <class Bits>
inline Bits unwanted(Wanted wanted, Bits value, Bits sign, Bits infinity) {
  const Bits not_finite = static_cast<Bits>(static_cast<Bits>(value & ~sign) + static_cast<Bits>(sign - infinity));
  const Bits positive = static_cast<Bits>(~static_cast<Bits>(value - 1) & ~value);
  return wanted == Wanted::decay ? static_cast<Bits>(not_finite | positive) : not_finite;
}

// Blocks of a constant length become vectors at -O2: of the 65,536 numbers of an A each token of selective_scan passes.
template <class Bits>
bool all_are(Wanted wanted, const Bits* values, int64_t count, Bits sign, Bits infinity) {
  constexpr int64_t kLanes = 16;
  Bits found[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; lane++) found[lane] |= unwanted(wanted, values[i + lane], sign, infinity);
  for (; i < count; i++) found[0] |= unwanted(wanted, values[i], sign, infinity);
  Bits any = 0;
  for (Bits each : found) any |= each;
  return !(any & sign);
}

bool all_are(Wanted wanted, const TensorView& tensor, int64_t at, int64_t count) {
  if (tensor.dtype == DType::float32)
    return all_are<uint32_t>(wanted, tensor.as<uint32_t>() + at, count, 1u << 31, 0x7f800000u);
  const uint16_t infinity = tensor.dtype == DType::bfloat16 ? 0x7f80 : 0x7c00;
  return all_are<uint16_t>(wanted, tensor.as<uint16_t>() + at, count, 0x8000, infinity);
}

struct Values {
  std::string_view op, name;
  const TensorView& tensor;  // dense rows
  Wanted wanted;
  std::string_view text;     // what is wanted, in words
};

void refuse_in_row(const Values& values, int64_t row) {
  const TensorView& tensor = values.tensor;
  const int64_t begin = begin_of_row(tensor, row);
  int64_t i = 0;
  while (all_are(values.wanted, tensor, begin + i, 1)) i++;
  int64_t index[4] = {0, 0, 0, i};
  for (int dim = tensor.rank - 2; dim >= 0; row /= tensor.size(dim), dim--) index[dim] = row % tensor.size(dim);
  index[tensor.rank - 1] = i;
  throw Error(ErrorKind::value, concat(values.op, ": ", values.name, " must be ", values.text, ", got ",
                                       number_at(tensor, begin + i), " at ",
                                       ShapeText{{index, static_cast<std::size_t>(tensor.rank)}}));
}

void refuse_others(const Values& values) {
  const TensorView& tensor = values.tensor;
  if (!tensor || tensor.numel() == 0) return;
  const int64_t columns = tensor.size(-1), rows = tensor.numel() / columns, block = (1 << 14) / columns + 1;
  std::atomic<int64_t> bad{rows};  // the first row that has one
  const bool is_one_run = tensor.is_contiguous();
  parallel_for((rows + block - 1) / block, threads_worth(2 * tensor.numel()), [&](int64_t task) {
    const int64_t begin = task * block, end = begin + block < rows ? begin + block : rows;
    if (is_one_run && all_are(values.wanted, tensor, begin * columns, (end - begin) * columns)) return;
    for (int64_t row = begin; row < end; row++) {
      if (all_are(values.wanted, tensor, begin_of_row(tensor, row), columns)) continue;
      for (int64_t first = bad; row < first && !bad.compare_exchange_weak(first, row);) {}
      return;
    }
  });
  if (bad < rows) refuse_in_row(values, bad);
}

}  // namespace

void refuse_bad_values(const GatedDeltaRuleArgs& args) {
  constexpr std::string_view op = "gated_delta_rule";
  refuse_bad_lengths(op, args.cu_seqlens, "q", args.tokens());
  if (!args.a_log)
    return refuse_others({op, "g", args.g, Wanted::decay, "finite and at most 0, the logarithm of a decay"});
  refuse_others({op, "A_log", args.a_log, Wanted::finite, "finite"});
  refuse_others({op, "dt_bias", args.dt_bias, Wanted::finite, "finite"});
  refuse_others({op, "g", args.g, Wanted::finite, "finite"});
}

namespace {

// Those of a state space model.
template <class Args>
void refuse_bad_steps(std::string_view op, const Args& args) {
  refuse_bad_lengths(op, args.cu_seqlens, "x", args.tokens());
  refuse_others({op, "A", args.a, Wanted::decay, "finite and at most 0"});
  refuse_others({op, "dt_bias", args.dt_bias, Wanted::finite, "finite"});
  refuse_others({op, "dt", args.dt, Wanted::finite, "finite"});
}

}  // namespace

void refuse_bad_values(const SsdArgs& args) { refuse_bad_steps("ssd", args); }
void refuse_bad_values(const SelectiveScanArgs& args) { refuse_bad_steps("selective_scan", args); }

}  // namespace lowbit::cpu
