// SPDX-License-Identifier: Apache-2.0
// The row of the op selective_scan. Channels do not depend on each other: a task is some blocks of 16 channels of a
// sequence. A block walks over a few tokens, then the next block over the same ones, so that rows of x, dt, z and y are
// read in whole cache lines. A single token changes the state as it lies in memory, a channel after the other.
#include LOWBIT_ISA_HEADER

#include <optional>

#include "core/parallel.hpp"
#include "core/scratch.hpp"
#include "cpu/recurrent/refused.hpp"
#include "cpu/recurrent/scan_block.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kScanWalk = 16;  // tokens that a block goes through before the next one

struct ScanMemory : TileArena {
  ScanTokens tokens;
  Matrix<float> rates, states;  // [blocks, S, 16]

  ScanMemory(Arena arena, const SelectiveScanArgs& args)
      : TileArena{arena}, tokens(*this, kScanWalk, args.s()), rates(blocks(args)), states(blocks(args)) {}

 private:
  Matrix<float> blocks(const SelectiveScanArgs& args) {
    return {array<float>(kScanBlocks * round_up(args.s(), 16) * 16), 16};
  }
};

struct ScanTask {
  int64_t number;  // of the sequence
  Sequence sequence;
  int64_t group;
  Span blocks;
};

void walk(const SelectiveScanArgs& args, const ScanBlock& block, int64_t batch, Span tokens, const ScanTokens& given,
          Matrix<float> state) {
  const Rows x = block.rows(args.x, batch), dt = block.rows(args.dt, batch), y = block.rows(args.y, batch);
  const std::optional<Rows> z = args.z ? std::optional(block.rows(args.z, batch)) : std::nullopt;
  const int64_t s = args.s();
  for (int64_t token = tokens.begin; token < tokens.end; token++) {
    const float *const b = given.b.row(token - tokens.begin), *const c = given.c.row(token - tokens.begin);
    const f32x16 value = x.load(token), delta = delta_of(args, add(dt.load(token), load(block.bias)));
    const f32x16 input = mul(delta, value);
    f32x16 out = mul(load(block.d), value);
    for (int64_t i = 0; i < s; i++) {
      const f32x16 decay = exp2_of_decay(mul(delta, load(block.rate.row(i))));
      const f32x16 next = fma(decay, load(state.row(i)), mul(input, set1(b[i])));
      store(state.row(i), next);
      out = fma(next, set1(c[i]), out);
    }
    y.store(token, z ? mul(out, silu(z->load(token))) : out);
  }
}

void run_prompt(const SelectiveScanArgs& args, const GroupBlocks& blocks, const ScanTask& task, ScanMemory& memory) {
  const auto& [batch, begin, end] = task.sequence;
  const int64_t s = args.s(), rows = round_up(s, 16);
  std::optional<ScanBlock> held[kScanBlocks];
  const auto state_of = [&](int64_t i) { return memory.states.from(i * rows); };
  const auto at = [&](const ScanBlock& block) { return (task.number * args.channels() + block.channel) * s; };
  for (int64_t i = 0; i < task.blocks.count(); i++) {
    held[i].emplace(blocks.block(args, task.group, task.blocks.begin + i, memory.rates.from(i * rows)));
    load_turned(args.state, at(*held[i]), held[i]->count, s, state_of(i));
  }
  for (int64_t token = begin; token < end; token += kScanWalk) {
    const Span tokens{token, smaller(token + kScanWalk, end)};
    memory.tokens.load(args, batch, tokens, task.group);
    for (int64_t i = 0; i < task.blocks.count(); i++) walk(args, *held[i], batch, tokens, memory.tokens, state_of(i));
  }
  for (int64_t i = 0; i < task.blocks.count(); i++)
    store_turned(state_of(i), held[i]->count, s, args.final_state, at(*held[i]));
}

// A state, from `at` on, at the only token of a sequence: read once and written once; returns C . h.
LOWBIT_INLINE float step_channel(const SelectiveScanArgs& args, int64_t channel, int64_t at, f32x16 delta, f32x16 input,
                                 const float* b, const float* c) {
  const int64_t s = args.s();
  f32x16 out = set1(0.0f);
  for (int64_t i = 0; i < s; i += 16) {
    f32x16 value = mul(input, load(b + i));
    if (args.state) {
      const f32x16 rate = log2_rate(load_as_float(args.a.data, args.a.dtype, channel * s + i, s - i));
      const f32x16 front = load_as_float(args.state.data, args.state.dtype, at + i, s - i);
      value = fma(exp2_of_decay(mul(delta, rate)), front, value);
    }
    store_from_float(args.final_state.data, args.final_state.dtype, at + i, s - i, value);
    out = fma(value, load(c + i), out);
  }
  return sum(out);
}

void run_token(const SelectiveScanArgs& args, const GroupBlocks& blocks, const ScanTask& task, ScanMemory& memory) {
  const auto& [batch, begin, end] = task.sequence;
  const auto rows_of = [&](const TensorView& tensor, int64_t channel, int64_t count) {
    return Rows(tensor, batch, channel, count);
  };
  memory.tokens.load(args, batch, {begin, end}, task.group);
  for (int64_t number = task.blocks.begin; number < task.blocks.end; number++) {
    const int64_t channel = task.group * blocks.channels + number * 16;
    const int64_t count = smaller(16, blocks.channels - number * 16);
    const auto of_channels = [&](const TensorView& tensor) {
      return tensor ? load_as_float(tensor.data, tensor.dtype, channel, count) : set1(0.0f);
    };
    const f32x16 value = rows_of(args.x, channel, count).load(begin);
    const f32x16 delta = delta_of(args, add(rows_of(args.dt, channel, count).load(begin), of_channels(args.dt_bias)));
    alignas(64) float deltas[16], inputs[16], out[16] = {};
    store(deltas, delta), store(inputs, mul(delta, value));
    for (int64_t i = 0; i < count; i++)
      out[i] = step_channel(args, channel + i, (task.number * args.channels() + channel + i) * args.s(),
                            set1(deltas[i]), set1(inputs[i]), memory.tokens.b.row(0), memory.tokens.c.row(0));
    f32x16 y = fma(of_channels(args.d), value, load(out));
    if (args.z) y = mul(y, silu(rows_of(args.z, channel, count).load(begin)));
    rows_of(args.y, channel, count).store(begin, y);
  }
}

void run_selective_scan(const SelectiveScanArgs& args) {
  refuse_bad_values(args);
  const int64_t sequences = args.sequences(), groups = args.groups();
  const GroupBlocks blocks(args);
  if (sequences == 0) return;
  const int threads = threads_worth(kScanProducts * args.x.numel() * args.s());
  const int64_t wanted = ceil_div(4 * threads, sequences * groups);  // tasks of a group in a sequence
  const RowTiles spans(blocks.count, larger(1, smaller(kScanBlocks, blocks.count / wanted)));
  parallel_for(sequences * groups * spans.count, threads, [&](int64_t number) {
    const int64_t span = number % spans.count, group = number / spans.count % groups;
    const int64_t sequence = number / spans.count / groups;
    const Scratch scratch(ScanMemory({}, args).bytes);
    ScanMemory memory(scratch.arena(), args);
    const ScanTask task{sequence, {args, sequence}, group, {spans.begin(span), spans.begin(span + 1)}};
    if (task.sequence.end - task.sequence.begin == 1) run_token(args, blocks, task, memory);
    else run_prompt(args, blocks, task, memory);
  });
}

constexpr Kernel<SelectiveScanArgs> kRows[] = {
    {LOWBIT_ROW("selective_scan"), never_refuses<SelectiveScanArgs>, run_selective_scan}};

}  // namespace

void recurrent_selective_scan_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
