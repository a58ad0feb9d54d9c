// SPDX-License-Identifier: Apache-2.0
// The row of the op sample. A task is a row of logits. top-k and top-p need no sorting: a histogram of the largest
// values has 4096 bins by the first 12 bits of their order; the bin with the limit is divided into 1024 by the next
// 10 bits, and once more. Each sum has one order, and vectors give the same bits on every instruction set, so
// results do too.
#include LOWBIT_ISA_HEADER

#include "ops/sample.hpp"

#include "core/parallel.hpp"
#include "core/random.hpp"
#include "core/scratch.hpp"
#include "cpu/loops.hpp"
#include "cpu/rows.hpp"
#include "cpu/sample/refused.hpp"
#include "cpu/simd/math.hpp"
#include "cpu/vector_io.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr float kInfinity = __builtin_inff();
constexpr int64_t kBins = 4096;
constexpr int64_t kBlock = 512;  // masses per float32 sum

// The numbers of one row, padded to whole blocks.
struct Row {
  float *values, *masses;
  double *bins, *blocks;
  int64_t bytes;

  Row(Arena arena, int64_t vocabulary)
      : values(arena.array<float>(round_up(vocabulary, kBlock))),
        masses(arena.array<float>(round_up(vocabulary, kBlock))),
        bins(arena.array<double>(kBins)),
        blocks(arena.array<double>(ceil_div(vocabulary, kBlock))),
        bytes(arena.bytes) {}
};

int64_t id_at(const TensorView& ids, int64_t at) {
  return ids.dtype == DType::int64 ? ids.as<int64_t>()[at] : static_cast<int64_t>(ids.as<int32_t>()[at]);
}

float logit_at(const TensorView& logits, int64_t at) {
  alignas(64) float lanes[16];
  store(lanes, load_as_float(logits.data, logits.dtype, at, 1));
  return lanes[0];
}

// Reads the original logit for each occurrence of an id, so that the penalty applies once.
void penalize(const SampleArgs& args, int64_t row, float* values) {
  const int64_t vocabulary = args.logits.size(1), length = args.ids.size(1);
  const float penalty = static_cast<float>(args.repetition_penalty);
  for (int64_t i = 0; i < length; i++) {
    const int64_t id = id_at(args.ids, row * length + i);
    if (id == -1) continue;
    if (id < 0 || id >= vocabulary) [[unlikely]] refuse_id(args, row, i, id);
    const float value = logit_at(args.logits, row * vocabulary + id);
    values[id] = value < 0 ? value * penalty : value / penalty;
  }
}

// The logits with penalty, padded with -inf to a whole block; returns the largest.
float read_logits(const SampleArgs& args, int64_t row, float* values) {
  const int64_t vocabulary = args.logits.size(1);
  for (int64_t i = 0; i < vocabulary; i += 16)
    store(values + i, load_as_float(args.logits.data, args.logits.dtype, row * vocabulary + i, vocabulary - i));
  for (int64_t i = vocabulary; i % kBlock; i++) values[i] = -kInfinity;
  if (args.ids) penalize(args, row, values);
  f32x16 most = set1(-kInfinity);
  bool ordered = true;
  for (int64_t i = 0; i < vocabulary; i += 16) {
    const f32x16 value = load(values + i);
    most = max(most, value);
    ordered &= all_at_most(value, set1(kInfinity));
  }
  const float found = largest(most);
  if (!ordered || found == kInfinity || found == -kInfinity) [[unlikely]] refuse_logits(row, !ordered, found);
  return found;
}

// exp((value - most) / temperature), 0 below exp(-87), 1 for the largest.
void find_masses(const SampleArgs& args, float most, const Row& row) {
  const double inverse = 1 / args.temperature;
  const f32x16 factor = set1(static_cast<float>(inverse > 1e30 ? 1e30 : inverse < 1e-30 ? 1e-30 : inverse));
  for (int64_t i = 0; i < args.logits.size(1); i += 16) {
    const f32x16 power = mul(sub(load(row.values + i), set1(most)), factor);
    store(row.masses + i, float_of(bit_and(at_least(power, set1(-87.0f)), bits_of(exp(power)))));
  }
}

// Integers in the order of the floats.
uint32_t order_of(float value) {
  const uint32_t bits = bits_of_float(value);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
float float_of_order(uint32_t order) { return float_from_bits(order >> 31 ? order & 0x7fffffffu : ~order); }

// Scanning from the largest value down: the value at which a sum reaches `wanted`, and the sum above it.
struct Limit {
  float value;
  double above;
};

// Sums masses, or counts values if there are none. Ignores values below `least`.
Limit find_limit(const Row& row, int64_t vocabulary, const float* masses, float least, double wanted) {
  uint32_t prefix = 0;
  double above = 0;
  for (int shift = 20; shift >= 0; shift -= 10) {
    const int width = shift == 20 ? 12 : 10;
    const int64_t bins = int64_t{1} << width;
    for (int64_t i = 0; i < bins; i++) row.bins[i] = 0;
    for (int64_t i = 0; i < vocabulary; i++) {
      const uint32_t order = order_of(row.values[i]);
      if (!(row.values[i] >= least) || (shift < 20 && order >> (shift + width) != prefix)) continue;
      row.bins[order >> shift & (bins - 1)] += masses ? static_cast<double>(masses[i]) : 1.0;
    }
    int64_t found = -1;  // if rounding leaves the sum below `wanted`: the last non-empty bin
    for (int64_t i = bins - 1; i >= 0; i--) {
      if (row.bins[i] == 0) continue;
      if (found >= 0) above += row.bins[found];
      found = i;
      if (above + row.bins[i] >= wanted) break;
    }
    prefix = prefix << width | static_cast<uint32_t>(found);
  }
  return {float_of_order(prefix), above};
}

double sum_of_blocks(const Row& row, int64_t vocabulary) {
  double all = 0;
  for (int64_t block = 0; block < ceil_div(vocabulary, kBlock); block++) {
    f32x16 masses = set1(0.0f);
    const int64_t begin = block * kBlock, end = begin + kBlock;
    for (int64_t i = begin; i < end && i < vocabulary; i += 16) masses = add(masses, load(row.masses + i));
    row.blocks[block] = total(masses);
    all += row.blocks[block];
  }
  return all;
}

// Zeroes the masses of values below the limit, and those below min_p.
void cut(const Row& row, int64_t vocabulary, float least, double min_p) {
  const f32x16 value = set1(least), mass = set1(static_cast<float>(min_p));
  for (int64_t i = 0; i < vocabulary; i += 16) {
    const f32x16 masses = load(row.masses + i);
    const i32x16 kept = bit_and(at_least(load(row.values + i), value), at_least(masses, mass));
    store(row.masses + i, float_of(bit_and(kept, bits_of(masses))));
  }
}

// Of the values equal to the limit keeps, from the last on, as many as the mass `wanted` needs, at least one.
void cut_equal(const Row& row, int64_t vocabulary, const Limit& limit, double wanted) {
  double above = limit.above;
  bool first = true;
  for (int64_t i = vocabulary - 1; i >= 0; i--) {
    if (row.values[i] != limit.value) continue;
    if (!first && above >= wanted) row.masses[i] = 0;
    above += static_cast<double>(row.masses[i]);
    first = false;
  }
}

// Zeroes the masses that top-k, top-p and min-p exclude; returns the sum of the others.
double keep(const SampleArgs& args, const Row& row) {
  const int64_t vocabulary = args.logits.size(1);
  float least = -kInfinity;
  if (args.top_k > 0 && args.top_k < vocabulary) {
    least = find_limit(row, vocabulary, nullptr, least, static_cast<double>(args.top_k)).value;
    cut(row, vocabulary, least, 0);
  }
  double all = sum_of_blocks(row, vocabulary);
  if (args.top_p >= 1 && args.min_p == 0) return all;
  if (args.top_p < 1) {
    const double wanted = args.top_p * all;
    const Limit limit = find_limit(row, vocabulary, row.masses, least, wanted);
    cut_equal(row, vocabulary, limit, wanted);
    least = limit.value;
  }
  cut(row, vocabulary, least, args.min_p);
  return sum_of_blocks(row, vocabulary);
}

// 53 random bits, 0 <= u < 1.
double uniform(const SampleArgs& args, int64_t row) {
  const auto half = [](int64_t number, int shift) {
    return static_cast<uint32_t>(static_cast<uint64_t>(number) >> shift);
  };
  const auto random = philox4x32({half(args.position, 0), half(args.position, 32), half(row, 0), half(row, 32)},
                                 {half(args.seed, 0), half(args.seed, 32)});
  return static_cast<double>((uint64_t{random[0]} << 32 | random[1]) >> 11) * 0x1p-53;
}

// The first token at which the cumulative mass exceeds `wanted`; if rounding prevents that, the last with a mass.
int64_t find_token(const Row& row, int64_t vocabulary, double wanted) {
  const int64_t blocks = ceil_div(vocabulary, kBlock);
  int64_t block = -1;
  for (int64_t i = 0; i < blocks; i++) {
    if (row.blocks[i] == 0) continue;
    if (block >= 0) wanted -= row.blocks[block];
    block = i;
    if (wanted < row.blocks[i]) break;
  }
  int64_t token = -1;
  double passed = 0;
  for (int64_t i = block * kBlock; i < vocabulary && i < (block + 1) * kBlock; i++) {
    if (row.masses[i] == 0) continue;
    token = i;
    passed += static_cast<double>(row.masses[i]);
    if (passed > wanted) break;
  }
  return token;
}

void run_sample(const SampleArgs& args) {
  const int64_t rows = args.logits.size(0), vocabulary = args.logits.size(1);
  const int64_t bytes = Row({}, vocabulary).bytes;
  parallel_for(rows, threads_worth(rows * vocabulary * 8), [&](int64_t number) {
    const Scratch scratch(bytes);
    const Row row(scratch.arena(), vocabulary);
    const float most = read_logits(args, number, row.values);
    int64_t& token = args.y.as<int64_t>()[number];
    if (args.temperature == 0) {
      for (token = 0; row.values[token] != most;) token++;
      return;
    }
    find_masses(args, most, row);
    const double all = keep(args, row);
    token = find_token(row, vocabulary, uniform(args, number) * all);
  });
}

constexpr Kernel<SampleArgs> kRows[] = {{LOWBIT_ROW("sample"), never_refuses<SampleArgs>, run_sample}};

}  // namespace

void sample_sample_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
