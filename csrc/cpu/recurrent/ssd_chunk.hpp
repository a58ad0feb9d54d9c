// SPDX-License-Identifier: Apache-2.0
// A chunk of ssd: a few tokens that change the state as one product. With P_ij the decay from token j to token i, p_i
// that from the start of the chunk to token i, P_end that to its end, and the state h^T [S, P] transposed:
//
//   Y = p (C h^T) + M X,        M_ij = P_ij delta_j C_i . B_j for j < i,  M_ii = delta_i C_i . B_i + D
//   h^T = p_end h^T + B^T (P_end delta X)
//
// Heads of a group share B, C and their products; what is of a head alone are factors of rows and of these products.
// Decays are products of those of tokens, and none exceeds 1: nothing overflows, and no difference of sums cancels.
#pragma once

#include "cpu/recurrent/sequences.hpp"
#include "cpu/recurrent/state_step.hpp"
#include "cpu/recurrent/time_steps.hpp"
#include "cpu/recurrent/state_rows.hpp"
#include "cpu/vector_io.hpp"
#include "ops/ssd.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// Two tiles of the AVX-512 micro-kernel. A token costs 2 S P products with the state and 24 P within the chunk.
constexpr int64_t kSsdChunk = 24, kSsdLanes = 32;

struct SsdChunk {
  int64_t token = -1, count = 0;  // the first, and how many
  int64_t group = -1;             // whose rows are loaded
  Matrix<float> b, c;             // rows of tokens [32, S], zeros behind the last token; [24, S]
  Matrix<float> lanes;            // B with a token per lane [S, 32]
  Matrix<float> products;         // C_i . B_j [24, 32]
  Matrix<float> pairs;            // M of a head [24, 32], 0 above its diagonal
  float *delta, *token_decay;     // [32], of each token of a head
  float *since, *ending;          // [32]: p; P_end delta
  float* decay;                   // [S]: that of the whole chunk, for each row of h^T

  SsdChunk(TileArena& arena, int64_t s)
      : b(arena.matrix<float>(kSsdLanes, s)), c(arena.matrix<float>(kSsdChunk, s)),
        lanes(arena.matrix<float>(round_up(s, 16), kSsdLanes)), products(arena.matrix<float>(kSsdChunk, kSsdLanes)),
        pairs(arena.matrix<float>(kSsdChunk, kSsdLanes)), delta(arena.array<float>(kSsdLanes)),
        token_decay(arena.array<float>(kSsdLanes)), since(arena.array<float>(kSsdLanes)),
        ending(arena.array<float>(kSsdLanes)), decay(arena.array<float>(round_up(s, 16))) {}
};

// The tokens token .. token + count - 1 of a group, unless they are there.
bool load_rows(SsdChunk& chunk, const SsdArgs& args, int64_t batch, int64_t token, int64_t count, int64_t group) {
  if (chunk.token == token && chunk.group == group) return false;
  chunk.token = token, chunk.count = count, chunk.group = group;
  for (int64_t i = 0; i < chunk.count; i++) {
    load_row(args.b, place_in(args.b, batch, chunk.token + i, chunk.group), args.s(), chunk.b.row(i));
    load_row(args.c, place_in(args.c, batch, chunk.token + i, chunk.group), args.s(), chunk.c.row(i));
  }
  return true;
}

void multiply_rows(SsdChunk& chunk, int64_t s) {
  clear_rows(chunk.b.from(chunk.count), kSsdLanes - chunk.count);
  for (int64_t i = 0; i < s; i += 16)
    for (int64_t lane = 0; lane < kSsdLanes; lane += 16)
      transpose_16x16(chunk.b.row(lane) + i, chunk.b.stride, chunk.lanes.row(i) + lane, chunk.lanes.stride);
  multiply<float>(chunk.c, chunk.lanes, chunk.products, {chunk.count, kSsdLanes, s});
}

LOWBIT_INLINE float of_head(const TensorView& tensor, int64_t head) { return tensor ? number_at(tensor, head) : 0; }

// delta and the decays of tokens.
void load_steps(SsdChunk& chunk, const SsdArgs& args, int64_t batch, int64_t head) {
  alignas(64) float given[kSsdLanes] = {};
  for (int64_t i = 0; i < chunk.count; i++)
    given[i] = number_at(args.dt, place_in(args.dt, batch, chunk.token + i, head));
  const f32x16 bias = set1(of_head(args.dt_bias, head)), a = set1(number_at(args.a, head));
  for (int64_t i = 0; i < kSsdLanes; i += 16) {
    const f32x16 delta = delta_of(args, add(load(given + i), bias));
    store(chunk.delta + i, delta);
    store(chunk.token_decay + i, exp(mul(delta, a)));
  }
}

// p, P_end delta, and the decay of the chunk.
void multiply_decays(SsdChunk& chunk, int64_t s) {
  float since = 1, until = 1;
  for (int64_t i = 0; i < chunk.count; i++) chunk.since[i] = since *= chunk.token_decay[i];
  for (int64_t i = chunk.count - 1; i >= 0; i--) {
    chunk.ending[i] = until * chunk.delta[i];
    until *= chunk.token_decay[i];
  }
  for (int64_t i = 0; i < s; i += 16) store(chunk.decay + i, set1(since));
}

// C_i . B_j times P_ij and a factor of token j, and `diagonal` added where i is j; 0 for j > i.
void decay_pairs(SsdChunk& chunk, const float* factors, float diagonal) {
  alignas(64) float since[kSsdLanes] = {};  // the decay from the token of each lane
  for (int64_t i = 0; i < chunk.count; i++) {
    const f32x16 decay = set1(chunk.token_decay[i]);
    for (int64_t lane = 0; lane < kSsdLanes; lane += 16) store(since + lane, mul(load(since + lane), decay));
    since[i] = 1;
    for (int64_t lane = 0; lane < kSsdLanes; lane += 16)
      store(chunk.pairs.row(i) + lane,
            mul(load(chunk.products.row(i) + lane), mul(load(since + lane), load(factors + lane))));
    chunk.pairs.row(i)[i] += diagonal;
  }
}

LOWBIT_INLINE int64_t group_of(const SsdArgs& args, int64_t head) { return head / (args.heads() / args.groups()); }

// What a head makes of the tokens that are loaded, but for the products of pairs.
void prepare_steps(SsdChunk& chunk, const SsdArgs& args, int64_t batch, int64_t head) {
  load_steps(chunk, args, batch, head);
  multiply_decays(chunk, args.s());
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
