// SPDX-License-Identifier: Apache-2.0
// The row of the op ssd. Rows of a state do not depend on each other: a task is a few heads of a sequence, or if these
// are few, a part of the rows of a head, and walks over the tokens, a chunk at a time. There the state is transposed,
// with its P rows as columns in strips, which stay in L1 through the products of a chunk. A single token changes the
// state as it lies in memory.
#include LOWBIT_ISA_HEADER

#include "ops/ssd.hpp"

#include "cpu/recurrent/heads_task.hpp"
#include "cpu/recurrent/refused.hpp"
#include "cpu/recurrent/ssd_chunk.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

struct HeadMemory : TileArena {
  SsdChunk chunk;
  Matrix<float> x, ending, out;  // X, P_end delta X, Y [24, kStrip]
  float* states;                 // the state of each head [strips, S, kStrip]

  HeadMemory(Arena arena, const SsdArgs& args, int64_t heads)
      : TileArena{arena}, chunk(*this, args.s()), x(matrix<float>(kSsdChunk, kStrip)),
        ending(matrix<float>(kSsdChunk, kStrip)), out(matrix<float>(kSsdChunk, kStrip)),
        states(array<float>(heads * round_up(args.p(), kStrip) * round_up(args.s(), 16))) {}
};

// Calls f(address in `state` and `final_state`, rows, strip) for each strip of a head.
template <class F>
LOWBIT_INLINE void for_strips(const SsdArgs& args, const HeadsTask& task, int64_t head, float* strips, F&& f) {
  const int64_t at = (task.sequence * args.heads() + head) * args.p() * args.s();
  const auto& [begin, end] = task.columns;
  for (int64_t row = begin; row < end; row += kStrip, strips += kStrip * round_up(args.s(), 16))
    f(at + row * args.s(), smaller(kStrip, end - row), Matrix<float>{strips, kStrip});
}

// The part `columns` of x and y at the tokens of a chunk; `state` is that part of the state.
void step_strip(const SsdArgs& args, HeadMemory& memory, int64_t batch, int64_t head, Span columns,
                Matrix<float> state) {
  const SsdChunk& chunk = memory.chunk;
  const TensorView &x = args.x, &y = args.y;
  const int64_t count = chunk.count, s = args.s(), width = columns.count();
  multiply<float>(chunk.c, state, memory.out, {count, width, s});
  for (int64_t i = 0; i < count; i++) {
    const int64_t at = place_in(x, batch, chunk.token + i, head) + columns.begin;
    for (int64_t j = 0; j < width; j += 16) {
      const f32x16 value = load_as_float(x.data, x.dtype, at + j, width - j);
      store(memory.x.row(i) + j, value);
      store(memory.ending.row(i) + j, mul(value, set1(chunk.ending[i])));
      store(memory.out.row(i) + j, mul(load(memory.out.row(i) + j), set1(chunk.since[i])));
    }
  }
  multiply<float>(chunk.pairs, memory.x, memory.out, {count, width, count}, {.sum = Sum::onto});
  for (int64_t i = 0; i < count; i++) {
    const int64_t at = place_in(y, batch, chunk.token + i, head) + columns.begin;
    for (int64_t j = 0; j < width; j += 16)
      store_from_float(y.data, y.dtype, at + j, width - j, load(memory.out.row(i) + j));
  }
  step_state({chunk.decay, chunk.b, memory.ending, count}, state, state, s, width);
}

// A row of a state, from `at` on, at the only token of a sequence: read once and written once; returns its product with
// C. One row after the other: with four in turn memory was read at half of the speed (Zen 4).
LOWBIT_INLINE float step_row(const SsdArgs& args, const SsdChunk& chunk, int64_t at, float x) {
  const int64_t s = args.s();
  const f32x16 decay = set1(chunk.token_decay[0]), input = set1(x * chunk.delta[0]);
  f32x16 out = set1(0.0f);
  for (int64_t i = 0; i < s; i += 16) {
    f32x16 value = mul(input, load(chunk.b.row(0) + i));
    if (args.state) value = fma(load_as_float(args.state.data, args.state.dtype, at + i, s - i), decay, value);
    store_from_float(args.final_state.data, args.final_state.dtype, at + i, s - i, value);
    out = fma(value, load(chunk.c.row(0) + i), out);
  }
  return sum(out);
}

void run_token(const SsdArgs& args, const HeadsTask& task, const Sequence& sequence, SsdChunk& chunk) {
  for (int64_t head = task.heads.begin; head < task.heads.end; head++) {
    load_rows(chunk, args, sequence.batch, sequence.begin, 1, group_of(args, head));
    load_steps(chunk, args, sequence.batch, head);
    const int64_t x_at = place_in(args.x, sequence.batch, sequence.begin, head);
    const int64_t y_at = place_in(args.y, sequence.batch, sequence.begin, head);
    const int64_t state_at = (task.sequence * args.heads() + head) * args.p() * args.s();
    const f32x16 d = set1(of_head(args.d, head));
    for (int64_t row = task.columns.begin; row < task.columns.end; row += 16) {
      const int64_t left = smaller(16, task.columns.end - row);
      const f32x16 given = load_as_float(args.x.data, args.x.dtype, x_at + row, left);
      alignas(64) float x[16], out[16] = {};
      store(x, given);
      for (int64_t r = 0; r < left; r++)
        out[r] = step_row(args, chunk, state_at + (row + r) * args.s(), x[r]);
      store_from_float(args.y.data, args.y.dtype, y_at + row, left, fma(d, given, load(out)));
    }
  }
}

void run_task(const SsdArgs& args, const HeadsTask& task, HeadMemory& memory) {
  const Sequence sequence(args, task.sequence);
  if (sequence.end - sequence.begin == 1) return run_token(args, task, sequence, memory.chunk);
  const auto& [begin, end] = task.heads;
  SsdChunk& chunk = memory.chunk;
  const int64_t p = task.columns.count(), s = args.s(), size = round_up(p, kStrip) * round_up(s, 16);
  const auto strips_of = [&](int64_t head) { return memory.states + (head - begin) * size; };
  for (int64_t head = begin; head < end; head++)
    for_strips(args, task, head, strips_of(head), [&](int64_t at, int64_t rows, Matrix<float> strip) {
      load_turned(args.state, at, rows, s, strip);
    });
  for (int64_t token = sequence.begin; token < sequence.end; token += kSsdChunk) {
    const int64_t count = smaller(kSsdChunk, sequence.end - token);
    for (int64_t head = begin; head < end; head++) {
      if (load_rows(chunk, args, sequence.batch, token, count, group_of(args, head))) multiply_rows(chunk, s);
      prepare_steps(chunk, args, sequence.batch, head);
      decay_pairs(chunk, chunk.delta, of_head(args.d, head));
      int64_t row = task.columns.begin;
      for_strips(args, task, head, strips_of(head), [&](int64_t, int64_t rows, Matrix<float> strip) {
        step_strip(args, memory, sequence.batch, head, {row, row + rows}, strip);
        row += rows;
      });
    }
  }
  for (int64_t head = begin; head < end; head++)
    for_strips(args, task, head, strips_of(head), [&](int64_t at, int64_t rows, Matrix<float> strip) {
      store_turned(strip, rows, s, args.final_state, at);
    });
}

void run_ssd(const SsdArgs& args) {
  refuse_bad_values(args);
  for_heads_tasks<HeadMemory>(args, args.s(), args.p(), threads_worth(2 * args.x.numel() * args.s()),
                              [&](const HeadsTask& task, HeadMemory& memory) { run_task(args, task, memory); });
}

constexpr Kernel<SsdArgs> kRows[] = {{LOWBIT_ROW("ssd"), never_refuses<SsdArgs>, run_ssd}};

}  // namespace

void recurrent_ssd_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
