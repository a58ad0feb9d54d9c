// SPDX-License-Identifier: Apache-2.0
// A chunk of the gated delta rule: a few tokens whose updates of the state S are one product. With P_ij the decay from
// token j to token i, p_i that from the start of the chunk to token i, and d_i = beta_i (v_i - what k_i reads):
//
//   d = T (beta (V - (p K) S)),   T = (I + beta A)^-1,   A_ij = P_ij k_i . k_j for j < i
//   o = (p Q) S + B d,                                   B_ij = P_ij q_i . k_j for j <= i
//   S = p_end S + (P_end K)^T d
//
// A chunk is small: it has as many rows as the micro-kernel of tile_products.hpp has accumulators for, so that a load of
// S serves many products; what a chunk costs beyond the three products of token by token grows with its size. Decays are
// products of those of tokens, and none exceeds 1: nothing overflows, and no difference of sums cancels.
#pragma once

#include "cpu/recurrent/sequences.hpp"
#include "cpu/recurrent/softplus.hpp"
#include "cpu/recurrent/state_step.hpp"
#include "cpu/simd/math.hpp"
#include "cpu/vector_io.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kChunk = 12;
static_assert(kChunk <= 16, "the keys of a chunk are the lanes of a vector");

struct DeltaChunk {
  int64_t token = -1, count = 0;  // the first, and how many
  int64_t key_head = -1;          // whose rows are loaded: value heads of a group share them
  Matrix<float> rows;       // keys, then queries: [2 count, Dk]; normalised and scaled
  Matrix<float> decayed;    // the same times the decay from the start of the chunk: p K, p Q
  Matrix<float> ending;     // keys times the decay to the end of the chunk [count, Dk]
  Matrix<float> decays;     // the decays of each token [count, Dk], if they are per channel
  Matrix<float> products;   // the products of keys and queries with keys, if decays are per head [2 count, 16]
  Matrix<float> pairs;      // A, then B: [2 count, 16], 0 above their diagonals
  Matrix<float> system;     // -beta A, below its diagonal [count, 16]
  Matrix<float> inverse;    // T [count, 16]
  float* lanes;             // [Dk, 16]: keys, with a token per lane
  float* decay;             // [Dk]: of the whole chunk
  float *token_decay, *beta;  // [16]: of each token; the decay if it is one of the head

  DeltaChunk(TileArena& arena, int64_t dk, bool per_channel)
      : rows(arena.matrix<float>(16 + kChunk, dk)), decayed(arena.matrix<float>(2 * kChunk, dk)),
        ending(arena.matrix<float>(kChunk, dk)), decays(arena.matrix<float>(per_channel ? kChunk : 0, dk)),
        products(arena.matrix<float>(2 * kChunk, 16)), pairs(arena.matrix<float>(2 * kChunk, 16)),
        system(arena.matrix<float>(kChunk, 16)), inverse(arena.matrix<float>(kChunk, 16)),
        lanes(arena.array<float>(round_up(dk, 16) * 16)), decay(arena.array<float>(round_up(dk, 16))),
        token_decay(arena.array<float>(16)), beta(arena.array<float>(16)) {}
};

// x, divided by its norm if that is wanted, times `factor`; returns what x was multiplied by.
float load_row(const TensorView& x, int64_t at, int64_t dk, bool l2norm, float factor, float* row) {
  f32x16 even = set1(0.0f), odd = set1(0.0f);  // squares
  int64_t c = 0;
  for (; c + 32 <= dk; c += 32) {
    const f32x16 first = load_as_float(x.data, x.dtype, at + c, 16);
    const f32x16 second = load_as_float(x.data, x.dtype, at + c + 16, 16);
    even = fma(first, first, even), odd = fma(second, second, odd);
    store(row + c, first), store(row + c + 16, second);
  }
  for (; c < dk; c += 16) {
    const f32x16 rest = load_as_float(x.data, x.dtype, at + c, dk - c);
    even = fma(rest, rest, even);
    store(row + c, rest);
  }
  if (l2norm) factor /= __builtin_sqrtf(sum(add(even, odd)) + kL2NormEpsilon);
  for (c = 0; c < dk; c += 16) store(row + c, mul(load(row + c), set1(factor)));
  return factor;
}

LOWBIT_INLINE f32x16 decay_of(const DeltaChunk& chunk, bool per_channel, int64_t token, int64_t channel) {
  return per_channel ? load(chunk.decays.row(token) + channel) : set1(chunk.token_decay[token]);
}

void load_keys(DeltaChunk& chunk, const GatedDeltaRuleArgs& args, int64_t batch) {
  const int64_t dk = args.dk(), count = chunk.count;
  for (int64_t i = 0; i < count; i++) {
    const int64_t token = chunk.token + i;
    load_row(args.k, place_in(args.k, batch, token, chunk.key_head), dk, args.l2norm, 1, chunk.rows.row(i));
    load_row(args.q, place_in(args.q, batch, token, chunk.key_head), dk, args.l2norm, static_cast<float>(args.scale),
             chunk.rows.row(count + i));
  }
}

void multiply_keys(DeltaChunk& chunk, int64_t dk) {
  for (int64_t c = 0; c < dk; c += 16)
    transpose_16x16(chunk.rows.data + c, chunk.rows.stride, chunk.lanes + c * 16, 16);
  multiply<float>(chunk.rows, Matrix<float>{chunk.lanes, 16}, chunk.products, {2 * chunk.count, 16, dk});
}

LOWBIT_INLINE float dot(const float* a, const float* b, int64_t count) {  // both up to the next multiple of 16
  f32x16 products = set1(0.0f);
  for (int64_t i = 0; i < count; i += 16) products = fma(load(a + i), load(b + i), products);
  return sum(products);
}

// The logarithms of decays, where a layer projects what becomes one.
LOWBIT_INLINE f32x16 made_logarithms(f32x16 speed, f32x16 projected, f32x16 bias) {
  return sub(set1(0.0f), mul(speed, softplus(add(projected, bias))));
}

// The decays of a token's channels, which begin at `at` of g.
void load_channels(const GatedDeltaRuleArgs& args, int64_t at, int64_t head, f32x16 speed, float* decays) {
  const TensorView &g = args.g, &bias = args.dt_bias;
  const int64_t dk = args.dk();
  for (int64_t c = 0; c < dk; c += 16) {
    f32x16 logarithms = load_as_float(g.data, g.dtype, at + c, dk - c);
    if (args.a_log) {
      const f32x16 moved = bias ? load_as_float(bias.data, bias.dtype, head * dk + c, dk - c) : set1(0.0f);
      logarithms = made_logarithms(speed, logarithms, moved);
    }
    store(decays + c, exp(logarithms));
  }
}

void load_decays(DeltaChunk& chunk, const GatedDeltaRuleArgs& args, int64_t batch, int64_t head) {
  const TensorView& g = args.g;
  const f32x16 speed = exp(set1(args.a_log ? number_at(args.a_log, head) : 0.0f));
  alignas(64) float logarithms[16] = {};
  store(chunk.beta, set1(0.0f));
  for (int64_t i = 0; i < chunk.count; i++) {
    chunk.beta[i] = number_at(args.beta, place_in(args.beta, batch, chunk.token + i, head));
    const int64_t at = place_in(g, batch, chunk.token + i, head);
    if (args.per_channel()) load_channels(args, at, head, speed, chunk.decays.row(i));
    else logarithms[i] = number_at(g, at);
  }
  if (args.a_log) {
    const f32x16 bias = set1(args.dt_bias && !args.per_channel() ? number_at(args.dt_bias, head) : 0.0f);
    store(logarithms, made_logarithms(speed, load(logarithms), bias));
    store(chunk.beta, mul(sigmoid(load(chunk.beta)), set1(static_cast<float>(args.beta_scale))));
  }
  store(chunk.token_decay, exp(load(logarithms)));
}

void decay_rows(DeltaChunk& chunk, int64_t dk, bool per_channel) {
  for (int64_t c = 0; c < dk; c += 16) {
    f32x16 since = set1(1.0f), until = set1(1.0f);
    for (int64_t i = 0; i < chunk.count; i++) {
      since = mul(since, decay_of(chunk, per_channel, i, c));
      for (const int64_t row : {i, chunk.count + i})
        store(chunk.decayed.row(row) + c, mul(load(chunk.rows.row(row) + c), since));
    }
    store(chunk.decay + c, since);
    for (int64_t i = chunk.count - 1; i >= 0; i--) {
      store(chunk.ending.row(i) + c, mul(load(chunk.rows.row(i) + c), until));
      until = mul(until, decay_of(chunk, per_channel, i, c));
    }
  }
}

constexpr float kLaneNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Products of keys and queries with keys, of which token i has those of tokens up to i, and keys none of its own.
LOWBIT_INLINE void store_pairs(DeltaChunk& chunk, int64_t i, f32x16 with_key, f32x16 with_query) {
  const f32x16 numbers = load(kLaneNumbers);
  const auto up_to = [&](int64_t last, f32x16 value) {
    return float_of(select(at_least(set1(static_cast<float>(last)), numbers), bits_of(value), set1(0)));
  };
  store(chunk.pairs.row(i), up_to(i - 1, with_key));
  store(chunk.pairs.row(chunk.count + i), up_to(i, with_query));
  store(chunk.system.row(i), mul(with_key, set1(-chunk.beta[i])));
}

// With a decay per head it is a factor of the products.
void decay_products(DeltaChunk& chunk) {
  alignas(64) float since[16] = {};  // the decay from the token of each lane
  for (int64_t i = 0; i < chunk.count; i++) {
    store(since, mul(load(since), set1(chunk.token_decay[i])));
    since[i] = 1;
    store_pairs(chunk, i, mul(load(chunk.products.row(i)), load(since)),
                mul(load(chunk.products.row(chunk.count + i)), load(since)));
  }
}

// With a decay per channel it is a factor of each term: the keys of earlier tokens decay on the way.
void multiply_decaying_pairs(DeltaChunk& chunk, int64_t dk) {
  for (int64_t c = 0; c < dk; c++) store(chunk.lanes + c * 16, set1(0.0f));
  for (int64_t i = 0; i < chunk.count; i++) {
    const float *key = chunk.rows.row(i), *query = chunk.rows.row(chunk.count + i), *decay = chunk.decays.row(i);
    f32x16 with_key = set1(0.0f), with_query = set1(0.0f);
    for (int64_t c = 0; c < dk; c++) {
      const f32x16 earlier = mul(load(chunk.lanes + c * 16), set1(decay[c]));
      store(chunk.lanes + c * 16, earlier);
      with_key = fma(set1(key[c]), earlier, with_key);
      with_query = fma(set1(query[c]), earlier, with_query);
    }
    for (int64_t c = 0; c < dk; c++) chunk.lanes[c * 16 + i] = key[c];
    store_pairs(chunk, i, with_key, with_query);
    chunk.pairs.row(chunk.count + i)[i] = dot(query, key, dk);
  }
}

// The tokens token .. token + count - 1 of a head.
void prepare(DeltaChunk& chunk, const GatedDeltaRuleArgs& args, int64_t batch, int64_t token, int64_t count,
             int64_t head) {
  const int64_t dk = args.dk(), key_head = head / (args.heads() / args.key_heads());
  if (chunk.token != token || chunk.key_head != key_head) {
    chunk.token = token, chunk.count = count, chunk.key_head = key_head;
    load_keys(chunk, args, batch);
    if (!args.per_channel()) multiply_keys(chunk, dk);
  }
  load_decays(chunk, args, batch, head);
  decay_rows(chunk, dk, args.per_channel());
  if (args.per_channel()) multiply_decaying_pairs(chunk, dk);
  else decay_products(chunk);
  for (int64_t i = 0; i < count; i++) {
    store(chunk.inverse.row(i), set1(0.0f));
    chunk.inverse.row(i)[i] = 1;
  }
  solve_lower(chunk.system, chunk.inverse, count, 16);
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
