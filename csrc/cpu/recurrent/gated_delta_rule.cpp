// SPDX-License-Identifier: Apache-2.0
// The row of the op gated_delta_rule. Columns of the state do not depend on each other: a task is a head of a sequence,
// or if these are few, a part of its columns, and walks over the tokens, a chunk at a time. Columns are kept in strips,
// which stay in L1 through the products of a chunk.
#include LOWBIT_ISA_HEADER

#include "ops/gated_delta_rule.hpp"

#include "cpu/recurrent/delta_chunk.hpp"
#include "cpu/recurrent/heads_task.hpp"
#include "cpu/recurrent/refused.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

struct HeadMemory : TileArena {
  DeltaChunk chunk;
  Matrix<float> seen, wanted, change;  // what keys and queries read of the state; beta (V - seen); d
  float* states;                       // the state of each head [strips, Dk, kStrip]

  HeadMemory(Arena arena, const GatedDeltaRuleArgs& args, int64_t heads)
      : TileArena{arena}, chunk(*this, args.dk(), args.per_channel()), seen(matrix<float>(2 * kChunk, kStrip)),
        wanted(matrix<float>(kChunk, kStrip)), change(matrix<float>(kChunk, kStrip)),
        states(array<float>(heads * round_up(args.dv(), kStrip) * args.dk())) {}
};

// Calls f(address in `state` and `final_state`, address in strips, columns left) for each row of 16 columns.
template <class F>
LOWBIT_INLINE void for_rows(const GatedDeltaRuleArgs& args, const HeadsTask& task, int64_t head, F&& f) {
  const int64_t dk = args.dk(), dv = args.dv(), at = (task.sequence * args.heads() + head) * dk * dv;
  for (int64_t c = 0; c < dk; c++)
    for (int64_t j = task.columns.begin; j < task.columns.end; j += 16) {
      const int64_t column = j - task.columns.begin;
      f(at + c * dv + j, column / kStrip * kStrip * dk + column % kStrip + c * kStrip, task.columns.end - j);
    }
}

void load_state(const GatedDeltaRuleArgs& args, const HeadsTask& task, int64_t head, float* strips) {
  const TensorView& state = args.state;
  for_rows(args, task, head, [&](int64_t at, int64_t to, int64_t left) {
    store(strips + to, state ? load_as_float(state.data, state.dtype, at, left) : set1(0.0f));
  });
}

void store_state(const GatedDeltaRuleArgs& args, const HeadsTask& task, int64_t head, const float* strips) {
  const TensorView& state = args.final_state;
  for_rows(args, task, head, [&](int64_t at, int64_t from, int64_t left) {
    store_from_float(state.data, state.dtype, at, left, load(strips + from));
  });
}

// The columns `columns` of v and o at the tokens of a chunk; `strip` is that part of the state.
void step_strip(const GatedDeltaRuleArgs& args, HeadMemory& memory, int64_t batch, int64_t token, int64_t head,
                Span columns, float* strip) {
  const DeltaChunk& chunk = memory.chunk;
  const TensorView &v = args.v, &o = args.o;
  const int64_t count = chunk.count, dk = args.dk(), width = columns.count();
  const Matrix<float> state{strip, kStrip}, out = memory.seen.from(count);
  multiply<float>(chunk.decayed, state, memory.seen, {2 * count, width, dk});
  for (int64_t i = 0; i < count; i++) {
    const int64_t at = place_in(v, batch, token + i, head) + columns.begin;
    for (int64_t j = 0; j < width; j += 16) {
      const f32x16 value = load_as_float(v.data, v.dtype, at + j, width - j);
      store(memory.wanted.row(i) + j, mul(sub(value, load(memory.seen.row(i) + j)), set1(chunk.beta[i])));
    }
  }
  multiply<float>(chunk.inverse, memory.wanted, memory.change, {count, width, count});
  multiply<float>(chunk.pairs.from(count), memory.change, out, {count, width, count}, {.sum = Sum::onto});
  for (int64_t i = 0; i < count; i++) {
    const int64_t at = place_in(o, batch, token + i, head) + columns.begin;
    for (int64_t j = 0; j < width; j += 16) store_from_float(o.data, o.dtype, at + j, width - j, load(out.row(i) + j));
  }
  step_state({chunk.decay, chunk.ending, memory.change, count}, state, state, dk, width);
}

// One token: of its products q . k is enough.
void prepare_token(DeltaChunk& chunk, const GatedDeltaRuleArgs& args, int64_t batch, int64_t token, int64_t head) {
  chunk.token = token, chunk.count = 1, chunk.key_head = head / (args.heads() / args.key_heads());
  load_keys(chunk, args, batch);
  load_decays(chunk, args, batch, head);
  decay_rows(chunk, args.dk(), args.per_channel());
  chunk.pairs.row(1)[0] = dot(chunk.rows.row(0), chunk.rows.row(1), args.dk());
}

// Columns of a head at the only token of a sequence, which `chunk` has: the state is read once and written once.
template <int kVectors>
void step_columns(const GatedDeltaRuleArgs& args, const DeltaChunk& chunk, int64_t state_at, int64_t v_at, int64_t o_at,
                  int64_t left) {
  const int64_t dk = args.dk(), dv = args.dv();
  const auto old = [&](int64_t c, int64_t v) {
    const TensorView& state = args.state;
    return state ? load_as_float(state.data, state.dtype, state_at + c * dv + v * 16, left - v * 16) : set1(0.0f);
  };
  f32x16 seen[kVectors], out[kVectors];
  unroll<kVectors>([&](auto v) { seen[v] = out[v] = set1(0.0f); });
  for (int64_t c = 0; args.state && c < dk; c++) {
    const f32x16 key = set1(chunk.decayed.row(0)[c]), query = set1(chunk.decayed.row(1)[c]);
    unroll<kVectors>([&](auto v) {
      const f32x16 value = old(c, v);
      seen[v] = fma(key, value, seen[v]), out[v] = fma(query, value, out[v]);
    });
  }
  f32x16 change[kVectors];
  unroll<kVectors>([&](auto v) {
    const f32x16 value = load_as_float(args.v.data, args.v.dtype, v_at + v * 16, left - v * 16);
    change[v] = mul(sub(value, seen[v]), set1(chunk.beta[0]));
    out[v] = fma(set1(chunk.pairs.row(1)[0]), change[v], out[v]);
    store_from_float(args.o.data, args.o.dtype, o_at + v * 16, left - v * 16, out[v]);
  });
  for (int64_t c = 0; c < dk; c++) {
    const f32x16 key = set1(chunk.ending.row(0)[c]), decay = set1(chunk.decay[c]);
    unroll<kVectors>([&](auto v) {
      store_from_float(args.final_state.data, args.final_state.dtype, state_at + c * dv + v * 16, left - v * 16,
                       fma(key, change[v], mul(old(c, v), decay)));
    });
  }
}

void run_token(const GatedDeltaRuleArgs& args, const HeadsTask& task, const Sequence& sequence, DeltaChunk& chunk) {
  for (int64_t head = task.heads.begin; head < task.heads.end; head++) {
    prepare_token(chunk, args, sequence.batch, sequence.begin, head);
    const int64_t state_at = (task.sequence * args.heads() + head) * args.dk() * args.dv();
    const int64_t v_at = place_in(args.v, sequence.batch, sequence.begin, head);
    const int64_t o_at = place_in(args.o, sequence.batch, sequence.begin, head);
    constexpr int kVectors = 2 * kFloatPanels;
    for (int64_t j = task.columns.begin; j < task.columns.end; j += 16 * kVectors) {
      const int64_t left = task.columns.end - j;
      with_count<kVectors>(static_cast<int>(smaller(kVectors, ceil_div(left, 16))), [&](auto count) {
        step_columns<count>(args, chunk, state_at + j, v_at + j, o_at + j, left);
      });
    }
  }
}

void run_task(const GatedDeltaRuleArgs& args, const HeadsTask& task, HeadMemory& memory) {
  const Sequence sequence(args, task.sequence);
  if (sequence.end - sequence.begin == 1) return run_token(args, task, sequence, memory.chunk);
  const auto& [begin, end] = task.heads;
  const int64_t size = round_up(task.columns.count(), kStrip) * args.dk();
  for (int64_t head = begin; head < end; head++) load_state(args, task, head, memory.states + (head - begin) * size);
  for (int64_t token = sequence.begin; token < sequence.end; token += kChunk) {
    for (int64_t head = begin; head < end; head++) {
      prepare(memory.chunk, args, sequence.batch, token, smaller(kChunk, sequence.end - token), head);
      float* strip = memory.states + (head - begin) * size;
      for (int64_t j = task.columns.begin; j < task.columns.end; j += kStrip, strip += kStrip * args.dk())
        step_strip(args, memory, sequence.batch, token, head, {j, smaller(j + kStrip, task.columns.end)}, strip);
    }
  }
  for (int64_t head = begin; head < end; head++) store_state(args, task, head, memory.states + (head - begin) * size);
}

void run_gated_delta_rule(const GatedDeltaRuleArgs& args) {
  refuse_bad_values(args);
  for_heads_tasks<HeadMemory>(args, args.dk(), args.dv(), threads_worth(3 * args.v.numel() * args.dk()),
                              [&](const HeadsTask& task, HeadMemory& memory) { run_task(args, task, memory); });
}

constexpr Kernel<GatedDeltaRuleArgs> kRows[] = {
    {LOWBIT_ROW("gated_delta_rule"), never_refuses<GatedDeltaRuleArgs>, run_gated_delta_rule}};

}  // namespace

void recurrent_gated_delta_rule_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
