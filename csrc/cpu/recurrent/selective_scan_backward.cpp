// SPDX-License-Identifier: Apache-2.0
// The row of the op selective_scan_backward. A task is some blocks of 16 channels of a group in a sequence, at most
// kParts tasks a group; their gradients of B and C are added over lanes and blocks, and then over tasks. A few blocks at
// a time go through all tokens: a first walk keeps the states in front of every chunk, and on the way back those within
// a chunk are computed again. With u = delta x, dh the gradient of the state behind a token, h' the state in front, and
// dy the gradient of y in front of the gate:
//
//   dh += dy C,   dC = dy h,   dB = dh u,   du = dh . B,   dx = delta du + D dy
//   w = exp(delta A) dh h',   dA = delta w,   ddelta = x du + w . A
//   dh = exp(delta A) dh                                  of the state in front
#include LOWBIT_ISA_HEADER

#include <optional>
#include <utility>

#include "core/scratch.hpp"
#include "cpu/recurrent/group_parts.hpp"
#include "cpu/recurrent/refused.hpp"
#include "cpu/recurrent/scan_block.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kScanChunk = 32;  // tokens from one state that is kept to the next
constexpr int64_t kParts = 16;      // so few that the parts of B's and C's gradients are small beside x

using ChunkNumbers = float[kScanChunk][16];  // of a block, at each token

// What is computed again of a chunk of a block.
struct ScanChunk {
  Matrix<float> states, decays;  // h, beginning with the one in front of the chunk [tokens + 1, S, 16]; exp(delta A)
  ChunkNumbers *x, *speed, *delta, *of_y;  // speed is dt + dt_bias; of_y is in front of the gate

  ScanChunk(TileArena& arena, int64_t s)
      : states{arena.array<float>((kScanChunk + 1) * s * 16), 16}, decays{arena.array<float>(kScanChunk * s * 16), 16},
        x(arena.array<ChunkNumbers>(1)), speed(arena.array<ChunkNumbers>(1)), delta(arena.array<ChunkNumbers>(1)),
        of_y(arena.array<ChunkNumbers>(1)) {}
};

// Gradients of a block that are added up over tokens; that of the state is stepped back.
struct BlockGradients {
  Matrix<float> of_state, of_a;  // [S, 16]
  float *of_d, *of_bias;         // [16]
};

// Gradients of a block for a sequence, of A [S, 16], D and dt_bias: rows of a matrix [S + 2, 16].
LOWBIT_INLINE BlockGradients gradients_in(Matrix<float> of_state, Matrix<float> sums, int64_t s) {
  return {of_state, sums, sums.row(round_up(s, 16)), sums.row(round_up(s, 16) + 1)};
}
LOWBIT_INLINE int64_t rows_of_sums(int64_t s) { return round_up(s, 16) + 2; }

struct BackwardMemory : TileArena {
  ScanTokens tokens;
  ScanChunk chunk;
  Matrix<float> rates, of_states;  // [blocks, S, 16]
  Matrix<float> of_b, of_c;        // of a chunk, each lane a sum over blocks [tokens, S, 16]
  Matrix<float> kept;              // states in front of chunks [chunks, blocks, S, 16]

  BackwardMemory(Arena arena, const SelectiveScanArgs& args, int64_t length)
      : TileArena{arena}, tokens(*this, kScanChunk, args.s()), chunk(*this, round_up(args.s(), 16)),
        rates(lanes(args, kScanBlocks)), of_states(lanes(args, kScanBlocks)), of_b(lanes(args, kScanChunk)),
        of_c(lanes(args, kScanChunk)), kept(lanes(args, ceil_div(length, kScanChunk) * kScanBlocks)) {}

 private:
  Matrix<float> lanes(const SelectiveScanArgs& args, int64_t count) {
    return {array<float>(count * round_up(args.s(), 16) * 16), 16};
  }
};

struct BackwardTask {
  int64_t number;  // of the sequence
  Sequence sequence;
  int64_t group;
  Span blocks;
  Matrix<float> of_b, of_c;  // a part [tokens, S]
  Matrix<float> sums;        // of all blocks of the sequence
};

// The state behind the tokens of a chunk.
void advance(const SelectiveScanArgs& args, const ScanBlock& block, int64_t batch, Span tokens, const ScanTokens& given,
             Matrix<float> front, Matrix<float> behind) {
  const Rows x = block.rows(args.x, batch), dt = block.rows(args.dt, batch);
  for (int64_t token = tokens.begin; token < tokens.end; token++) {
    const f32x16 delta = delta_of(args, add(dt.load(token), load(block.bias))), input = mul(delta, x.load(token));
    const Matrix<float> from = token == tokens.begin ? front : behind;
    for (int64_t i = 0; i < args.s(); i++) {
      const f32x16 decay = exp2_of_decay(mul(delta, load(block.rate.row(i))));
      const f32x16 added = mul(input, set1(given.b.row(token - tokens.begin)[i]));
      store(behind.row(i), fma(decay, load(from.row(i)), added));
    }
  }
}

// The states of a chunk; stores the gradient of z.
void compute_again(const SelectiveScanBackwardArgs& args, const ScanBlock& block, int64_t batch, Span tokens,
                   const ScanTokens& given, ScanChunk& chunk) {
  const SelectiveScanArgs& forward = args.forward;
  const int64_t s = forward.s(), rows = round_up(s, 16);
  const Rows x = block.rows(forward.x, batch), dt = block.rows(forward.dt, batch);
  const Rows of_y = block.rows(args.grad_y, batch);
  for (int64_t token = tokens.begin, t = 0; token < tokens.end; token++, t++) {
    const Matrix<float> front = chunk.states.from(t * rows), behind = chunk.states.from((t + 1) * rows);
    const f32x16 value = x.load(token), speed = add(dt.load(token), load(block.bias));
    const f32x16 delta = delta_of(forward, speed), input = mul(delta, value);
    f32x16 out = mul(load(block.d), value), of_out = of_y.load(token);
    for (int64_t i = 0; i < s; i++) {
      const f32x16 decay = exp2_of_decay(mul(delta, load(block.rate.row(i))));
      const f32x16 next = fma(decay, load(front.row(i)), mul(input, set1(given.b.row(t)[i])));
      store(chunk.decays.row(t * rows + i), decay);
      store(behind.row(i), next);
      out = fma(next, set1(given.c.row(t)[i]), out);
    }
    if (forward.z) {
      const f32x16 z = block.rows(forward.z, batch).load(token), gate = sigmoid(z);
      const f32x16 slope = mul(gate, fma(z, sub(set1(1.0f), gate), set1(1.0f)));  // of silu
      block.rows(args.grad_z, batch).store(token, mul(mul(of_out, out), slope));
      of_out = mul(of_out, mul(z, gate));
    }
    store((*chunk.x)[t], value), store((*chunk.speed)[t], speed), store((*chunk.delta)[t], delta);
    store((*chunk.of_y)[t], of_out);
  }
}

// Steps the gradient of the state back through a chunk, whose states are there, and stores those of x and dt.
void step_back(const SelectiveScanBackwardArgs& args, const ScanBlock& block, int64_t batch, Span tokens,
               const BackwardMemory& memory, const BlockGradients& to) {
  const SelectiveScanArgs& forward = args.forward;
  const ScanChunk& chunk = memory.chunk;
  const int64_t s = forward.s(), rows = round_up(s, 16);
  const Rows grad_x = block.rows(args.grad_x, batch), grad_dt = block.rows(args.grad_dt, batch);
  f32x16 of_d = load(to.of_d), of_bias = load(to.of_bias);
  for (int64_t t = tokens.count() - 1; t >= 0; t--) {
    const Matrix<float> front = chunk.states.from(t * rows), behind = chunk.states.from((t + 1) * rows);
    const Matrix<float> of_b = memory.of_b.from(t * rows), of_c = memory.of_c.from(t * rows);
    const f32x16 x = load((*chunk.x)[t]), speed = load((*chunk.speed)[t]), delta = load((*chunk.delta)[t]);
    const f32x16 of_y = load((*chunk.of_y)[t]), input = mul(delta, x);
    f32x16 of_input = set1(0.0f), of_log = set1(0.0f);  // of_log is of delta by decays, divided by ln 2
    for (int64_t i = 0; i < s; i++) {
      const f32x16 of_state = fma(of_y, set1(memory.tokens.c.row(t)[i]), load(to.of_state.row(i)));
      store(of_c.row(i), fma(of_y, load(behind.row(i)), load(of_c.row(i))));
      store(of_b.row(i), fma(of_state, input, load(of_b.row(i))));
      of_input = fma(of_state, set1(memory.tokens.b.row(t)[i]), of_input);
      const f32x16 kept = mul(of_state, load(chunk.decays.row(t * rows + i)));
      store(to.of_state.row(i), kept);
      const f32x16 of_power = mul(kept, load(front.row(i)));
      of_log = fma(of_power, load(block.rate.row(i)), of_log);
      store(to.of_a.row(i), fma(of_power, delta, load(to.of_a.row(i))));
    }
    const f32x16 of_dt = of_speed(forward, speed, fma(of_input, x, mul(of_log, set1(0x1.62e43p-1f))));
    grad_x.store(tokens.begin + t, fma(delta, of_input, mul(load(block.d), of_y)));
    grad_dt.store(tokens.begin + t, of_dt);
    of_d = fma(of_y, x, of_d);
    of_bias = add(of_bias, of_dt);
  }
  store(to.of_d, of_d), store(to.of_bias, of_bias);
}

// Adds the sums over lanes of rows [tokens, S, 16] to those of a part [tokens, S].
void add_lanes(Matrix<float> lanes, int64_t tokens, int64_t s, Matrix<float> to) {
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t i = 0; i < s; i += 16) {
      alignas(64) float turned[16 * 16];
      transpose_16x16(lanes.row(t * round_up(s, 16) + i), 16, turned, 16);
      f32x16 total = load(to.row(t) + i);
      for (int64_t lane = 0; lane < 16; lane++) total = add(total, load(turned + lane * 16));
      store(to.row(t) + i, total);
    }
}

// A few blocks, from number `first` of the group on.
void run_span(const SelectiveScanBackwardArgs& args, const GroupBlocks& blocks, const BackwardTask& task, Span span,
              BackwardMemory& memory) {
  const SelectiveScanArgs& forward = args.forward;
  const auto& [batch, begin, end] = task.sequence;
  const int64_t s = forward.s(), rows = round_up(s, 16), count = span.count();
  const int64_t chunks = ceil_div(end - begin, kScanChunk);
  std::optional<ScanBlock> held[kScanBlocks];
  const auto at = [&](const ScanBlock& block) { return (task.number * forward.channels() + block.channel) * s; };
  const auto kept = [&](int64_t chunk, int64_t i) { return memory.kept.from((chunk * kScanBlocks + i) * rows); };
  const auto sums_of = [&](int64_t i) {
    return task.sums.from((task.group * blocks.count + span.begin + i) * rows_of_sums(s));
  };
  const auto load_tokens = [&](int64_t chunk) {
    const Span tokens{begin + chunk * kScanChunk, smaller(begin + (chunk + 1) * kScanChunk, end)};
    memory.tokens.load(forward, batch, tokens, task.group);
    return tokens;
  };
  for (int64_t i = 0; i < count; i++) {
    held[i].emplace(blocks.block(forward, task.group, span.begin + i, memory.rates.from(i * rows)));
    load_turned(args.grad_final_state, at(*held[i]), held[i]->count, s, memory.of_states.from(i * rows));
    clear_rows(sums_of(i), rows_of_sums(s));
    if (chunks > 0) load_turned(forward.state, at(*held[i]), held[i]->count, s, kept(0, i));
  }
  for (int64_t chunk = 0; chunk + 1 < chunks; chunk++) {
    const Span tokens = load_tokens(chunk);
    for (int64_t i = 0; i < count; i++)
      advance(forward, *held[i], batch, tokens, memory.tokens, kept(chunk, i), kept(chunk + 1, i));
  }
  for (int64_t chunk = chunks - 1; chunk >= 0; chunk--) {
    const Span tokens = load_tokens(chunk);
    clear_rows(memory.of_b, tokens.count() * rows), clear_rows(memory.of_c, tokens.count() * rows);
    for (int64_t i = 0; i < count; i++) {
      for (int64_t r = 0; r < s; r++) store(memory.chunk.states.row(r), load(kept(chunk, i).row(r)));
      compute_again(args, *held[i], batch, tokens, memory.tokens, memory.chunk);
      step_back(args, *held[i], batch, tokens, memory, gradients_in(memory.of_states.from(i * rows), sums_of(i), s));
    }
    add_lanes(memory.of_b, tokens.count(), s, task.of_b.from(tokens.begin - begin));
    add_lanes(memory.of_c, tokens.count(), s, task.of_c.from(tokens.begin - begin));
  }
  for (int64_t i = 0; i < count; i++)
    store_turned(memory.of_states.from(i * rows), held[i]->count, s, args.grad_state, at(*held[i]));
}

// The gradients of A, D and dt_bias: the sums of all sequences.
void store_of_channels(const SelectiveScanBackwardArgs& args, const GroupBlocks& blocks, Matrix<float> sums) {
  const SelectiveScanArgs& forward = args.forward;
  const int64_t s = forward.s(), rows = rows_of_sums(s), all = forward.groups() * blocks.count;
  const int64_t sequences = forward.sequences();
  parallel_for(all, threads_worth(sequences * all * rows * 16), [&](int64_t number) {
    const Matrix<float> of_block = sums.from(number * rows);
    if (sequences == 0) clear_rows(of_block, rows);
    for (int64_t n = 1; n < sequences; n++)
      for (int64_t i = 0; i < rows; i++)
        store(of_block.row(i), add(load(of_block.row(i)), load(sums.row((n * all + number) * rows + i))));
    const int64_t first = number % blocks.count * 16, channel = number / blocks.count * blocks.channels + first;
    const int64_t count = smaller(16, blocks.channels - first);
    const BlockGradients from = gradients_in({}, of_block, s);
    store_turned(from.of_a, count, s, args.grad_a, channel * s);
    const auto put = [&](const TensorView& grad, const float* numbers) {
      store_from_float(grad.data, grad.dtype, channel, count, load(numbers));
    };
    if (forward.d) put(args.grad_d, from.of_d);
    if (forward.dt_bias) put(args.grad_dt_bias, from.of_bias);
  });
}

void run_selective_scan_backward(const SelectiveScanBackwardArgs& args) {
  const SelectiveScanArgs& forward = args.forward;
  refuse_bad_values(forward);
  const int64_t sequences = forward.sequences(), groups = forward.groups();
  const GroupBlocks blocks(forward);
  const RowTiles tasks(blocks.count, ceil_div(blocks.count, kParts));
  const int64_t rows = groups * blocks.count * rows_of_sums(forward.s());  // of sums of a sequence
  const auto lay_out = [&](TileArena& arena) {
    const GroupParts parts(arena, forward, tasks.count);
    return std::pair(parts, Matrix<float>{arena.array<float>(larger(1, sequences) * rows * 16), 16});
  };
  TileArena counted{};
  lay_out(counted);
  const Scratch scratch(counted.bytes);
  TileArena arena{scratch.arena()};
  const auto [parts, sums] = lay_out(arena);
  const int threads = threads_worth(4 * kScanProducts * forward.x.numel() * forward.s());
  parallel_for(sequences * groups * tasks.count, threads, [&, parts = parts, sums = sums](int64_t number) {
    const int64_t part = number % tasks.count, group = number / tasks.count % groups, n = number / tasks.count / groups;
    const Sequence sequence(forward, n);
    const int64_t length = sequence.end - sequence.begin, row = parts.row_of(sequence, group, part);
    const Scratch own(BackwardMemory({}, forward, length).bytes);
    BackwardMemory memory(own.arena(), forward, length);
    const BackwardTask task{n, sequence, group, {tasks.begin(part), tasks.begin(part + 1)},
                            parts.of_b.from(row), parts.of_c.from(row), sums.from(n * rows)};
    clear_rows(task.of_b, length), clear_rows(task.of_c, length);
    const RowTiles spans(task.blocks.count(), kScanBlocks);
    for (int64_t i = 0; i < spans.count; i++) {
      const Span span{task.blocks.begin + spans.begin(i), task.blocks.begin + spans.begin(i + 1)};
      run_span(args, blocks, task, span, memory);
    }
  });
  store_parts(args, parts, threads);
  store_of_channels(args, blocks, sums);
}

constexpr Kernel<SelectiveScanBackwardArgs> kRows[] = {
    {LOWBIT_ROW("selective_scan_backward"), never_refuses<SelectiveScanBackwardArgs>, run_selective_scan_backward}};

}  // namespace

void recurrent_selective_scan_backward_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
