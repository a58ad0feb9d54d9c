// SPDX-License-Identifier: Apache-2.0
// The row of the op gated_delta_rule_backward. A task is a head of q and k in a sequence: the heads of v that it serves
// come one after the other, so that their gradients of q and k are added in order. States are computed again: a walk
// over all tokens keeps that of every fifth chunk, from which those between follow when the way back reaches them.
#include LOWBIT_ISA_HEADER

#include "ops/gated_delta_rule.hpp"

#include "core/parallel.hpp"
#include "core/scratch.hpp"
#include "cpu/recurrent/delta_backward.hpp"
#include "cpu/recurrent/refused.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kKept = 5;  // chunks from one state that is kept to the next

struct BackwardMemory : TileArena {
  DeltaChunk chunk;
  ChunkGradients gradients;
  Matrix<float> wanted, of_state;     // [kChunk, Dv], [Dk, Dv]
  Matrix<float> of_keys, of_queries;  // sums over heads of v [tokens, Dk]
  Matrix<float> row;                  // [1, Dk]
  ChunkValues values[kKept];
  Matrix<float> kept;                 // [states, Dk, Dv]

  BackwardMemory(Arena arena, const GatedDeltaRuleArgs& args, int64_t tokens)
      : TileArena{arena}, chunk(*this, args.dk(), args.per_channel()), gradients(*this, args.dk(), args.dv()),
        wanted(matrix<float>(kChunk, args.dv())), of_state(matrix<float>(round_up(args.dk(), 16), args.dv())),
        of_keys(matrix<float>(tokens, args.dk())), of_queries(matrix<float>(tokens, args.dk())),
        row(matrix<float>(1, args.dk())) {
    for (ChunkValues& of : values)
      of = {matrix<float>(round_up(args.dk(), 16), args.dv()), matrix<float>(16, args.dv()),
            matrix<float>(16, args.dv())};
    kept = matrix<float>(ceil_div(tokens, kKept * kChunk) * args.dk(), args.dv());
  }
};

// A head of q and k in a sequence.
struct BackwardTask {
  int64_t number, key_head;  // the number of the sequence, and a head of its keys
  Sequence sequence;
};

// From [.., Dk, Dv], contiguous, at `at`; zeros if there is none.
void load_matrix(const TensorView& states, int64_t at, int64_t dk, int64_t dv, Matrix<float> to) {
  clear_rows(to, round_up(dk, 16));
  for (int64_t c = 0; states && c < dk; c++)
    for (int64_t j = 0; j < dv; j += 16)
      store(to.row(c) + j, load_as_float(states.data, states.dtype, at + c * dv + j, dv - j));
}

void copy_matrix(Matrix<float> from, Matrix<float> to, int64_t rows) {
  for (int64_t i = 0; i < rows * from.stride; i += 16) store(to.data + i, load(from.data + i));
}

void advance_to(const GatedDeltaRuleArgs& args, const BackwardTask& task, int64_t head, int64_t number,
                const ChunkValues& values, Matrix<float> behind, BackwardMemory& memory) {
  const Sequence& sequence = task.sequence;
  const int64_t token = sequence.begin + number * kChunk;
  prepare(memory.chunk, args, sequence.batch, token, smaller(kChunk, sequence.end - token), head);
  advance(memory.chunk, args, sequence.batch, head, values, memory.wanted, behind);
}

void add_rows_of_chunk(Matrix<float> from, int64_t count, bool is_first_head, Matrix<float> to) {
  for (int64_t i = 0; i < count * from.stride; i += 16)
    store(to.data + i, is_first_head ? load(from.data + i) : add(load(to.data + i), load(from.data + i)));
}

void run_head(const GatedDeltaRuleBackwardArgs& args, const BackwardTask& task, int64_t head, bool is_first_head,
              BackwardMemory& memory) {
  const GatedDeltaRuleArgs& forward = args.forward;
  const int64_t dk = forward.dk(), dv = forward.dv(), state_at = (task.number * forward.heads() + head) * dk * dv;
  const int64_t chunks = ceil_div(task.sequence.end - task.sequence.begin, kChunk), blocks = ceil_div(chunks, kKept);
  ChunkValues* const values = memory.values;
  load_matrix(forward.state, state_at, dk, dv, values[0].state);
  for (int64_t i = 1; i < kKept; i++) clear_rows(values[i].state, round_up(dk, 16));
  for (int64_t number = 0; blocks > 0 && number <= (blocks - 1) * kKept; number++) {
    if (number % kKept == 0) copy_matrix(values[0].state, memory.kept.from(number / kKept * dk), dk);
    if (number < (blocks - 1) * kKept) advance_to(forward, task, head, number, values[0], values[0].state, memory);
  }
  load_matrix(args.grad_final_state, state_at, dk, dv, memory.of_state);
  for (int64_t block = blocks - 1; block >= 0; block--) {
    const int64_t first = block * kKept, count = smaller(kKept, chunks - first);
    copy_matrix(memory.kept.from(block * dk), values[0].state, dk);
    for (int64_t i = 0; i < count; i++)
      advance_to(forward, task, head, first + i, values[i], i + 1 < count ? values[i + 1].state : Matrix<float>{},
                 memory);
    for (int64_t i = count - 1; i >= 0; i--) {
      const int64_t token = (first + i) * kChunk, begin = task.sequence.begin + token;
      prepare(memory.chunk, forward, task.sequence.batch, begin, smaller(kChunk, task.sequence.end - begin), head);
      step_back(memory.chunk, args, task.sequence.batch, head, values[i], memory.of_state, memory.gradients);
      add_rows_of_chunk(memory.gradients.of_keys, memory.chunk.count, is_first_head, memory.of_keys.from(token));
      add_rows_of_chunk(memory.gradients.of_queries, memory.chunk.count, is_first_head, memory.of_queries.from(token));
    }
  }
  for (int64_t c = 0; c < dk; c++)
    for (int64_t j = 0; j < dv; j += 16)
      store_from_float(args.grad_state.data, args.grad_state.dtype, state_at + c * dv + j, dv - j,
                       load(memory.of_state.row(c) + j));
}

// The gradient of x from that of the row that load_row makes of it with the factor `scale`.
void store_of_row(const GatedDeltaRuleArgs& args, const TensorView& x, int64_t at, float scale, const float* of_row,
                  float* row, const TensorView& grad, int64_t grad_at) {
  const int64_t dk = args.dk();
  const float factor = load_row(x, at, dk, args.l2norm, 1, row) * scale;
  const f32x16 along = set1(args.l2norm ? dot(row, of_row, dk) : 0.0f);  // a normalized row cannot grow
  for (int64_t c = 0; c < dk; c += 16) {
    const f32x16 value = sub(load(of_row + c), mul(load(row + c), along));
    store_from_float(grad.data, grad.dtype, grad_at + c, dk - c, mul(value, set1(factor)));
  }
}

void run_task(const GatedDeltaRuleBackwardArgs& args, const BackwardTask& task) {
  const GatedDeltaRuleArgs& forward = args.forward;
  const auto& [batch, begin, end] = task.sequence;
  const Scratch scratch(BackwardMemory({}, forward, end - begin).bytes);
  BackwardMemory memory(scratch.arena(), forward, end - begin);
  const int64_t group = forward.heads() / forward.key_heads();
  for (int64_t i = 0; i < group; i++) run_head(args, task, task.key_head * group + i, i == 0, memory);
  for (int64_t token = begin; token < end; token++) {
    store_of_row(forward, forward.k, place_in(forward.k, batch, token, task.key_head), 1,
                 memory.of_keys.row(token - begin), memory.row.data, args.grad_k,
                 place_in(args.grad_k, batch, token, task.key_head));
    store_of_row(forward, forward.q, place_in(forward.q, batch, token, task.key_head),
                 static_cast<float>(forward.scale), memory.of_queries.row(token - begin), memory.row.data, args.grad_q,
                 place_in(args.grad_q, batch, token, task.key_head));
  }
}

void run_gated_delta_rule_backward(const GatedDeltaRuleBackwardArgs& args) {
  const GatedDeltaRuleArgs& forward = args.forward;
  refuse_bad_values(forward);
  const int64_t key_heads = forward.key_heads();
  const int threads = threads_worth(10 * forward.v.numel() * forward.dk());
  parallel_for(forward.sequences() * key_heads, threads, [&](int64_t task) {
    run_task(args, {task / key_heads, task % key_heads, Sequence(forward, task / key_heads)});
  });
}

constexpr Kernel<GatedDeltaRuleBackwardArgs> kRows[] = {{LOWBIT_ROW("gated_delta_rule_backward"),
                                                         never_refuses<GatedDeltaRuleBackwardArgs>,
                                                         run_gated_delta_rule_backward}};

}  // namespace

void recurrent_gated_delta_rule_backward_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
