// SPDX-License-Identifier: Apache-2.0
// The gradient of the gated delta rule for one chunk (delta_chunk.hpp), given that of its outputs, dO, and of the state
// behind it, dS. With W = P_end K, U = V - (p K) S, and R = U - A d, so that d = beta R:
//
//   X = T^T (B^T dO + W dS),  Y = beta X             gradients of d and of U
//   dV = Y,  dbeta = X . R,  dA = -Y d^T,  dB = dO d^T
//   d(p K) = -Y S^T,  d(p Q) = dO S^T,  dW = d dS^T
//   dS = p_end dS + (p Q)^T dO - (p K)^T Y           of the state in front
//
// Decays: the gradient of the logarithm of p at a token is q . dq + k . dk of what it reads (as a row of A and B, or of
// S) - k . dk of what it writes (as a column, or in W); that of g is the sum of these from the token to the chunk's end.
// Sums over pairs of tokens go from pair to pair by Horner's rule, with the decay of one token as the factor.
#pragma once

#include "cpu/recurrent/delta_chunk.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// What a chunk has computed in the forward, kept for its gradient.
struct ChunkValues {
  Matrix<float> state;            // S in front of it [Dk, Dv]; rows and columns up to the next multiples of 16 are 0
  Matrix<float> missing, change;  // U and d [16, Dv]
};

struct ChunkGradients {
  Matrix<float> outer;                // -Y, then dO: [2 count, Dv]
  Matrix<float> of_change, solved;    // dd and X [count, Dv]
  Matrix<float> rest;                 // R [count, Dv]
  Matrix<float> turned;               // a transposed state [Dv, Dk], or d [Dv, 16]
  Matrix<float> of_decayed;           // d(p K), then d(p Q): [2 count, Dk]
  Matrix<float> of_ending;            // dW [count, Dk]
  Matrix<float> of_pairs;             // dA, then dB: [2 count, 16]
  Matrix<float> of_keys, of_queries;  // gradients of the rows [count, Dk]
  Matrix<float> of_decays;            // gradients of g per channel [count, Dk]
  float* of_end;                      // [Dk]: sum over columns of S dS

  ChunkGradients(TileArena& arena, int64_t dk, int64_t dv)
      : outer(arena.matrix<float>(2 * kChunk, dv)), of_change(arena.matrix<float>(kChunk, dv)),
        solved(arena.matrix<float>(kChunk, dv)), rest(arena.matrix<float>(kChunk, dv)),
        turned(arena.matrix<float>(round_up(dv, 16), dk)), of_decayed(arena.matrix<float>(2 * kChunk, dk)),
        of_ending(arena.matrix<float>(kChunk, dk)), of_pairs(arena.matrix<float>(2 * kChunk, 16)),
        of_keys(arena.matrix<float>(kChunk, dk)), of_queries(arena.matrix<float>(kChunk, dk)),
        of_decays(arena.matrix<float>(kChunk, dk)), of_end(arena.array<float>(round_up(dk, 16))) {}
};

// to [columns, rows] = from^T; both are rounded up to 16.
void transpose(Matrix<float> from, int64_t rows, int64_t columns, Matrix<float> to) {
  for (int64_t i = 0; i < rows; i += 16)
    for (int64_t j = 0; j < columns; j += 16) transpose_16x16(from.row(i) + j, from.stride, to.row(j) + i, to.stride);
}

// U and d from v and the state in front; then the state behind the chunk, if it has a place. `wanted`: beta U.
void advance(const DeltaChunk& chunk, const GatedDeltaRuleArgs& args, int64_t batch, int64_t head,
             const ChunkValues& values, Matrix<float> wanted, Matrix<float> behind) {
  const int64_t count = chunk.count, dk = args.dk(), dv = args.dv();
  const TensorView& v = args.v;
  multiply<float>(chunk.decayed, values.state, values.missing, {count, dv, dk});
  for (int64_t i = 0; i < count; i++) {
    const int64_t at = place_in(v, batch, chunk.token + i, head);
    for (int64_t j = 0; j < dv; j += 16) {
      const f32x16 missing = sub(load_as_float(v.data, v.dtype, at + j, dv - j), load(values.missing.row(i) + j));
      store(values.missing.row(i) + j, missing);
      store(wanted.row(i) + j, mul(missing, set1(chunk.beta[i])));
    }
  }
  multiply<float>(chunk.inverse, wanted, values.change, {count, dv, count});
  if (behind.data) step_state({chunk.decay, chunk.ending, values.change, count}, values.state, behind, dk, dv);
}

// dd, X and Y; the gradients of v and beta.
void solve_change(const DeltaChunk& chunk, const GatedDeltaRuleBackwardArgs& args, int64_t batch, int64_t head,
                  const ChunkValues& values, Matrix<float> of_state, const ChunkGradients& to) {
  const int64_t count = chunk.count, dk = args.forward.dk(), dv = args.forward.dv();
  const TensorView& grad_o = args.grad_o;
  const Matrix<float> of_out = to.outer.from(count);
  for (int64_t i = 0; i < count; i++) {
    const int64_t at = place_in(grad_o, batch, chunk.token + i, head);
    for (int64_t j = 0; j < dv; j += 16)
      store(of_out.row(i) + j, load_as_float(grad_o.data, grad_o.dtype, at + j, dv - j));
  }
  multiply<float>(transposed(chunk.pairs.from(count)), of_out, to.of_change, {count, dv, count});
  multiply<float>(chunk.ending, of_state, to.of_change, {count, dv, dk}, {.sum = Sum::onto});
  multiply<float>(transposed(chunk.inverse), to.of_change, to.solved, {count, dv, count});
  multiply<float>(chunk.pairs, values.change, to.rest, {count, dv, count});
  for (int64_t i = 0; i < count; i++) {
    f32x16 of_beta = set1(0.0f);
    const int64_t at = place_in(args.grad_v, batch, chunk.token + i, head);
    for (int64_t j = 0; j < dv; j += 16) {
      const f32x16 solved = load(to.solved.row(i) + j), of_value = mul(solved, set1(chunk.beta[i]));
      of_beta = fma(solved, sub(load(values.missing.row(i) + j), load(to.rest.row(i) + j)), of_beta);
      store(to.outer.row(i) + j, sub(set1(0.0f), of_value));
      store_from_float(args.grad_v.data, args.grad_v.dtype, at + j, dv - j, of_value);
    }
    store_from_float(args.grad_beta.data, args.grad_beta.dtype,
                     place_in(args.grad_beta, batch, chunk.token + i, head), 1, set1(sum(of_beta)));
  }
}

// Gradients of the products with the state, and of those of pairs; that of the state in front.
void multiply_gradients(const DeltaChunk& chunk, int64_t dk, int64_t dv, const ChunkValues& values,
                        Matrix<float> of_state, const ChunkGradients& to) {
  const int64_t count = chunk.count;
  transpose(values.state, dk, dv, to.turned);
  multiply<float>(to.outer, to.turned, to.of_decayed, {2 * count, dk, dv});
  transpose(of_state, dk, dv, to.turned);
  multiply<float>(values.change, to.turned, to.of_ending, {count, dk, dv});
  transpose(values.change, 16, dv, to.turned);
  multiply<float>(to.outer, to.turned, to.of_pairs, {2 * count, 16, dv});
  for (int64_t c = 0; c < round_up(dk, 16); c++) to.of_end[c] = dot(values.state.row(c), of_state.row(c), dv);
  step_state({chunk.decay, chunk.decayed, to.outer, 2 * count}, of_state, of_state, dk, dv);
}

// Gradients of the rows of the chunk and of its decays, for 16 channels.
void gather_channels(const DeltaChunk& chunk, const ChunkGradients& to, bool per_channel, int64_t c) {
  const int64_t count = chunk.count;
  const Matrix<float> queries = chunk.rows.from(count), of_scores = to.of_pairs.from(count);
  f32x16 of_end = mul(load(to.of_end + c), load(chunk.decay + c));
  f32x16 since = set1(1.0f), until = set1(1.0f);
  for (int64_t i = 0; i < count; i++) {  // what a token reads
    since = mul(since, decay_of(chunk, per_channel, i, c));
    f32x16 of_key = set1(0.0f), of_query = set1(0.0f);
    for (int64_t j = 0; j < i; j++) {
      const f32x16 key = load(chunk.rows.row(j) + c), decay = decay_of(chunk, per_channel, j + 1, c);
      of_key = mul(fma(set1(to.of_pairs.row(i)[j]), key, of_key), decay);
      of_query = mul(fma(set1(of_scores.row(i)[j]), key, of_query), decay);
    }
    of_key = fma(load(to.of_decayed.row(i) + c), since, of_key);
    of_query = fma(load(to.of_decayed.row(count + i) + c), since, of_query);
    store(to.of_decays.row(i) + c, fma(load(chunk.rows.row(i) + c), of_key, mul(load(queries.row(i) + c), of_query)));
    store(to.of_keys.row(i) + c, of_key);
    store(to.of_queries.row(i) + c, fma(set1(of_scores.row(i)[i]), load(chunk.rows.row(i) + c), of_query));
  }
  for (int64_t j = count - 1; j >= 0; j--) {  // what it writes
    f32x16 written = set1(0.0f);
    for (int64_t i = count - 1; i > j; i--) {
      written = fma(set1(to.of_pairs.row(i)[j]), load(chunk.rows.row(i) + c), written);
      written = fma(set1(of_scores.row(i)[j]), load(queries.row(i) + c), written);
      written = mul(written, decay_of(chunk, per_channel, i, c));
    }
    const f32x16 key = load(chunk.rows.row(j) + c), ending = mul(load(to.of_ending.row(j) + c), until);
    of_end = fma(key, ending, of_end);
    written = add(written, ending);
    until = mul(until, decay_of(chunk, per_channel, j, c));
    store(to.of_decays.row(j) + c, sub(load(to.of_decays.row(j) + c), mul(key, written)));
    written = fma(set1(of_scores.row(j)[j]), load(queries.row(j) + c), written);
    store(to.of_keys.row(j) + c, add(load(to.of_keys.row(j) + c), written));
  }
  for (int64_t i = count - 1; i >= 0; i--) {  // a decay counts for all tokens from its own to the end
    of_end = add(of_end, load(to.of_decays.row(i) + c));
    store(to.of_decays.row(i) + c, of_end);
  }
}

void store_of_decays(const DeltaChunk& chunk, const GatedDeltaRuleBackwardArgs& args, int64_t batch, int64_t head,
                     const ChunkGradients& from) {
  const TensorView& grad = args.grad_g;
  const int64_t dk = args.forward.dk();
  for (int64_t i = 0; i < chunk.count; i++) {
    const int64_t at = place_in(grad, batch, chunk.token + i, head);
    f32x16 of_head = set1(0.0f);
    for (int64_t c = 0; c < dk; c += 16) {
      const f32x16 value = load(from.of_decays.row(i) + c);
      if (args.forward.per_channel()) store_from_float(grad.data, grad.dtype, at + c, dk - c, value);
      else of_head = add(of_head, value);  // channels beyond Dk are 0
    }
    if (!args.forward.per_channel()) store_from_float(grad.data, grad.dtype, at, 1, set1(sum(of_head)));
  }
}

// All gradients of a chunk; of_state is that of the state behind it, and becomes that of the state in front.
void step_back(const DeltaChunk& chunk, const GatedDeltaRuleBackwardArgs& args, int64_t batch, int64_t head,
               const ChunkValues& values, Matrix<float> of_state, const ChunkGradients& to) {
  const int64_t dk = args.forward.dk(), dv = args.forward.dv();
  solve_change(chunk, args, batch, head, values, of_state, to);
  multiply_gradients(chunk, dk, dv, values, of_state, to);
  for (int64_t c = 0; c < dk; c += 16) gather_channels(chunk, to, args.forward.per_channel(), c);
  store_of_decays(chunk, args, batch, head, to);
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
