// SPDX-License-Identifier: Apache-2.0
// The row of the op ssd_backward. A task is some heads of a group in a sequence, at most kBlocks of them a group, which
// come one after the other; their gradients of B and C are added in order, and then those of the tasks. States are
// computed again: a walk over all tokens keeps that of every fifth chunk, from which those between follow when the way
// back reaches them.
#include LOWBIT_ISA_HEADER

#include <utility>

#include "core/scratch.hpp"
#include "cpu/recurrent/group_parts.hpp"
#include "cpu/recurrent/refused.hpp"
#include "cpu/recurrent/ssd_backward.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kKept = 5;    // chunks from one state that is kept to the next
constexpr int64_t kBlocks = 8;  // the number of blocks of a group's heads, so few that B and C are small beside x

struct BackwardMemory : TileArena {
  SsdChunk chunk;
  SsdGradients gradients;
  Matrix<float> of_state;       // [S, P]
  Matrix<float> states[kKept];  // in front of the chunks of a block
  Matrix<float> kept;           // [states, S, P]

  BackwardMemory(Arena arena, const SsdArgs& args, int64_t tokens)
      : TileArena{arena}, chunk(*this, args.s()), gradients(*this, args.p(), args.s()),
        of_state(matrix<float>(round_up(args.s(), 16), args.p())) {
    for (Matrix<float>& state : states) state = matrix<float>(round_up(args.s(), 16), args.p());
    kept = matrix<float>(ceil_div(tokens, kKept * kSsdChunk) * round_up(args.s(), 16), args.p());
  }
};

// Sums over tokens, of a head in a sequence.
struct HeadSums {
  double of_a, of_d, of_bias;
};

// Heads of a group in a sequence; gradients of B and C of these [tokens, S].
struct BackwardTask {
  int64_t number, group;  // the number of the sequence
  Span heads;
  Sequence sequence;
  Matrix<float> of_b, of_c;
  HeadSums* sums;  // the sums of each head of the sequence
};

void copy_rows(Matrix<float> from, Matrix<float> to, int64_t rows) {
  for (int64_t i = 0; i < rows * from.stride; i += 16) store(to.data + i, load(from.data + i));
}

// The tokens of chunk `number` and what a head makes of them.
void load_chunk(const SsdArgs& args, const BackwardTask& task, int64_t head, int64_t number, SsdChunk& chunk) {
  const auto& [batch, begin, end] = task.sequence;
  const int64_t token = begin + number * kSsdChunk;
  load_rows(chunk, args, batch, token, smaller(kSsdChunk, end - token), task.group);
  prepare_steps(chunk, args, batch, head);
}

void advance_to(const SsdArgs& args, const BackwardTask& task, int64_t head, int64_t number, Matrix<float> front,
                Matrix<float> behind, BackwardMemory& memory) {
  load_chunk(args, task, head, number, memory.chunk);
  advance(memory.chunk, args, task.sequence.batch, head, memory.gradients, front, behind);
}

// From gradients of delta and delta A to those of dt, dt_bias and A.
void store_of_steps(const SsdBackwardArgs& args, const SsdChunk& chunk, int64_t batch, int64_t head,
                    const SsdGradients& from, HeadSums& sums) {
  const SsdArgs& forward = args.forward;
  const float a = number_at(forward.a, head), bias = of_head(forward.dt_bias, head);
  for (int64_t i = 0; i < chunk.count; i++) {
    const float speed = number_at(forward.dt, place_in(forward.dt, batch, chunk.token + i, head)) + bias;
    alignas(64) float lanes[16];
    store(lanes, of_speed(forward, set1(speed), set1(from.of_delta[i] + from.of_log[i] * a)));
    const float grad = lanes[0];
    sums.of_a += static_cast<double>(from.of_log[i] * chunk.delta[i]);
    sums.of_bias += static_cast<double>(grad);
    store_from_float(args.grad_dt.data, args.grad_dt.dtype, place_in(args.grad_dt, batch, chunk.token + i, head), 1,
                     set1(grad));
  }
}

void add_rows(Matrix<float> from, int64_t count, bool is_first_head, Matrix<float> to) {
  for (int64_t i = 0; i < count * from.stride; i += 16)
    store(to.data + i, is_first_head ? load(from.data + i) : add(load(to.data + i), load(from.data + i)));
}

// All gradients of a chunk; of_state is that of the state behind it, and becomes that of the state in front.
void step_back(const SsdBackwardArgs& args, const BackwardTask& task, int64_t head, int64_t number,
               Matrix<float> state, BackwardMemory& memory) {
  const SsdArgs& forward = args.forward;
  const int64_t batch = task.sequence.batch, p = forward.p(), s = forward.s();
  SsdChunk& chunk = memory.chunk;
  SsdGradients& to = memory.gradients;
  HeadSums& sums = task.sums[head];
  load_chunk(forward, task, head, number, chunk);
  multiply_rows(chunk, s);
  for (int64_t i = 0; i < kSsdLanes; i += 16) store(to.ones + i, set1(1.0f));
  decay_pairs(chunk, to.ones, 0);
  for (int64_t i = 0; i < chunk.count; i++) {
    load_row(forward.x, place_in(forward.x, batch, chunk.token + i, head), p, to.x.row(i));
    load_row(args.grad_y, place_in(args.grad_y, batch, chunk.token + i, head), p, to.of_y.row(i));
  }
  clear_rows(to.x.from(chunk.count), kSsdLanes - chunk.count);
  scale_rows(to.x, chunk.ending, chunk.count, p, to.ending);
  sums.of_d += static_cast<double>(gather_update(chunk, forward, to, memory.of_state, args.grad_x, batch, head));
  decay_gradients(chunk, to, p);
  multiply_gradients(chunk, forward, to, state, memory.of_state);
  store_of_steps(args, chunk, batch, head, to, sums);
  scale_rows(to.of_y, chunk.since, chunk.count, p, to.ending);
  step_state({chunk.decay, chunk.c, to.ending, chunk.count}, memory.of_state, memory.of_state, s, p);
  add_rows(to.of_b, chunk.count, head == task.heads.begin, task.of_b.from(number * kSsdChunk));
  add_rows(to.of_c, chunk.count, head == task.heads.begin, task.of_c.from(number * kSsdChunk));
}

void run_head(const SsdBackwardArgs& args, const BackwardTask& task, int64_t head, BackwardMemory& memory) {
  const SsdArgs& forward = args.forward;
  const int64_t p = forward.p(), s = forward.s(), rows = round_up(s, 16);
  const int64_t state_at = (task.number * forward.heads() + head) * p * s;
  const int64_t chunks = ceil_div(task.sequence.end - task.sequence.begin, kSsdChunk), blocks = ceil_div(chunks, kKept);
  Matrix<float>* const states = memory.states;
  task.sums[head] = {};
  for (int64_t i = 0; i < kKept; i++) clear_rows(states[i], rows);
  load_turned(forward.state, state_at, p, s, states[0]);
  for (int64_t number = 0; blocks > 0 && number <= (blocks - 1) * kKept; number++) {
    if (number % kKept == 0) copy_rows(states[0], memory.kept.from(number / kKept * rows), rows);
    if (number < (blocks - 1) * kKept) advance_to(forward, task, head, number, states[0], states[0], memory);
  }
  clear_rows(memory.of_state, rows);
  load_turned(args.grad_final_state, state_at, p, s, memory.of_state);
  for (int64_t block = blocks - 1; block >= 0; block--) {
    const int64_t first = block * kKept, count = smaller(kKept, chunks - first);
    copy_rows(memory.kept.from(block * rows), states[0], rows);
    for (int64_t i = 0; i + 1 < count; i++)
      advance_to(forward, task, head, first + i, states[i], states[i + 1], memory);
    for (int64_t i = count - 1; i >= 0; i--) step_back(args, task, head, first + i, states[i], memory);
  }
  store_turned(memory.of_state, p, s, args.grad_state, state_at);
}

void store_of_heads(const SsdBackwardArgs& args, const HeadSums* sums) {
  const int64_t heads = args.forward.heads(), sequences = args.forward.sequences();
  for (int64_t head = 0; head < heads; head++) {
    HeadSums total{};
    for (int64_t n = 0; n < sequences; n++) {
      const HeadSums& of = sums[n * heads + head];
      total = {total.of_a + of.of_a, total.of_d + of.of_d, total.of_bias + of.of_bias};
    }
    const auto put = [&](const TensorView& grad, double value) {
      store_from_float(grad.data, grad.dtype, head, 1, set1(static_cast<float>(value)));
    };
    put(args.grad_a, total.of_a), put(args.grad_d, total.of_d), put(args.grad_dt_bias, total.of_bias);
  }
}

void run_ssd_backward(const SsdBackwardArgs& args) {
  const SsdArgs& forward = args.forward;
  refuse_bad_values(forward);
  const int64_t sequences = forward.sequences(), groups = forward.groups(), heads = forward.heads() / groups;
  const RowTiles blocks(heads, ceil_div(heads, kBlocks));
  const auto lay_out = [&](TileArena& arena) {
    const GroupParts parts(arena, forward, blocks.count);
    return std::pair(parts, arena.array<HeadSums>(sequences * forward.heads()));
  };
  TileArena counted{};
  lay_out(counted);
  const Scratch scratch(counted.bytes);
  TileArena arena{scratch.arena()};
  const auto [parts, sums] = lay_out(arena);
  const int threads = threads_worth(6 * forward.x.numel() * forward.s());
  parallel_for(sequences * groups * blocks.count, threads, [&, parts = parts, sums = sums](int64_t task) {
    const int64_t block = task % blocks.count, group = task / blocks.count % groups, n = task / blocks.count / groups;
    const Sequence sequence(forward, n);
    const int64_t length = sequence.end - sequence.begin, row = parts.row_of(sequence, group, block);
    const Scratch own(BackwardMemory({}, forward, length).bytes);
    BackwardMemory memory(own.arena(), forward, length);
    const BackwardTask of{n, group, {group * heads + blocks.begin(block), group * heads + blocks.begin(block + 1)},
                          sequence, parts.of_b.from(row), parts.of_c.from(row), sums + n * forward.heads()};
    for (int64_t head = of.heads.begin; head < of.heads.end; head++) run_head(args, of, head, memory);
  });
  store_parts(args, parts, threads);
  store_of_heads(args, sums);
}

constexpr Kernel<SsdBackwardArgs> kRows[] = {
    {LOWBIT_ROW("ssd_backward"), never_refuses<SsdBackwardArgs>, run_ssd_backward}};

}  // namespace

void recurrent_ssd_backward_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
