// SPDX-License-Identifier: Apache-2.0
// The gradient of ssd for one chunk of a head (ssd_chunk.hpp), given that of its outputs, dY, and of the state behind
// it, dh. With N_ij = P_ij C_i . B_j for j <= i, u = delta x, and U the rows u:
//
//   V = N^T dY + P_end (B dh^T),  dx = delta V + D dY,  ddelta = x . V,  dD = x . dY
//   dG_ij = P_ij delta_j dY_i . x_j                     of C_i . B_j
//   dC = p (dY h) + dG B,  dB = P_end (U dh) + dG^T C
//   dh^T = p_end dh^T + (p C)^T dY                      of the state in front
//
// Decays: the gradient of the logarithm of p at a token is C . dC of what it reads - B . dB of what it writes, both
// without dG_ii, which cancels; that of delta A is the sum of these from the token to the chunk's end, and of h . dh
// there.
#pragma once

#include "cpu/recurrent/ssd_chunk.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

struct SsdGradients {
  Matrix<float> x, of_y;            // X [32, P], zeros behind the last token; dY [24, P]
  Matrix<float> ending;             // P_end delta X, then p dY [24, P]
  Matrix<float> of_update;          // V [24, P]
  Matrix<float> written;            // B dh^T [24, P]
  Matrix<float> turned;             // a state [P, S], or X^T [P, 32]
  Matrix<float> of_pairs;           // dG, without its diagonal [24, 32]
  Matrix<float> of_b, of_c;         // [24, S]
  float *ones, *of_delta, *of_log;  // [32]; of delta; of p, then of delta A
  float* of_own;                    // [32]: the diagonal of dG

  SsdGradients(TileArena& arena, int64_t p, int64_t s)
      : x(arena.matrix<float>(kSsdLanes, p)), of_y(arena.matrix<float>(kSsdChunk, p)),
        ending(arena.matrix<float>(kSsdChunk, p)), of_update(arena.matrix<float>(kSsdChunk, p)),
        written(arena.matrix<float>(kSsdChunk, p)), turned(arena.matrix<float>(round_up(p, 16), larger(s, kSsdLanes))),
        of_pairs(arena.matrix<float>(kSsdChunk, kSsdLanes)), of_b(arena.matrix<float>(kSsdChunk, s)),
        of_c(arena.matrix<float>(kSsdChunk, s)), ones(arena.array<float>(kSsdLanes)),
        of_delta(arena.array<float>(kSsdLanes)), of_log(arena.array<float>(kSsdLanes)),
        of_own(arena.array<float>(kSsdLanes)) {}
};

LOWBIT_INLINE float dot(const float* a, const float* b, int64_t count) {  // both up to the next multiple of 16
  f32x16 products = set1(0.0f);
  for (int64_t i = 0; i < count; i += 16) products = fma(load(a + i), load(b + i), products);
  return sum(products);
}

// to [columns, rows] = from^T; both are rounded up to 16.
void turn(Matrix<float> from, int64_t rows, int64_t columns, Matrix<float> to) {
  for (int64_t i = 0; i < rows; i += 16)
    for (int64_t j = 0; j < columns; j += 16) transpose_16x16(from.row(i) + j, from.stride, to.row(j) + i, to.stride);
}

LOWBIT_INLINE void scale_rows(Matrix<float> from, const float* factors, int64_t count, int64_t columns,
                              Matrix<float> to) {
  for (int64_t i = 0; i < count; i++)
    for (int64_t j = 0; j < columns; j += 16) store(to.row(i) + j, mul(load(from.row(i) + j), set1(factors[i])));
}

// The state behind a chunk from that in front; both [S, P].
void advance(const SsdChunk& chunk, const SsdArgs& args, int64_t batch, int64_t head, SsdGradients& to,
             Matrix<float> front, Matrix<float> behind) {
  for (int64_t i = 0; i < chunk.count; i++)
    load_row(args.x, place_in(args.x, batch, chunk.token + i, head), args.p(), to.x.row(i));
  scale_rows(to.x, chunk.ending, chunk.count, args.p(), to.ending);
  step_state({chunk.decay, chunk.b, to.ending, chunk.count}, front, behind, args.s(), args.p());
}

// dG, from the products of dY and X.
void decay_gradients(const SsdChunk& chunk, SsdGradients& to, int64_t p) {
  turn(to.x, kSsdLanes, p, to.turned);
  multiply<float>(to.of_y, to.turned, to.of_pairs, {chunk.count, kSsdLanes, p});
  alignas(64) float since[kSsdLanes] = {};
  for (int64_t i = 0; i < chunk.count; i++) {
    float* const row = to.of_pairs.row(i);
    for (int64_t lane = 0; lane < kSsdLanes; lane += 16)
      store(since + lane, mul(load(since + lane), set1(chunk.token_decay[i])));
    to.of_own[i] = row[i] * chunk.delta[i];
    for (int64_t lane = 0; lane < kSsdLanes; lane += 16)
      store(row + lane, mul(load(row + lane), mul(load(since + lane), load(chunk.delta + lane))));
    since[i] = 1;
  }
}

// Gradients of B and C of this head, and of the logarithms of decays.
void multiply_gradients(const SsdChunk& chunk, const SsdArgs& args, SsdGradients& to, Matrix<float> state,
                        Matrix<float> of_state) {
  const int64_t count = chunk.count, p = args.p(), s = args.s();
  turn(state, s, p, to.turned);
  multiply<float>(to.of_y, to.turned, to.of_c, {count, s, p});
  scale_rows(to.of_c, chunk.since, count, s, to.of_c);
  multiply<float>(to.of_pairs, chunk.b, to.of_c, {count, s, count}, {.sum = Sum::onto});
  turn(of_state, s, p, to.turned);
  multiply<float>(to.ending, to.turned, to.of_b, {count, s, p});
  float of_end = 0;
  for (int64_t i = 0; i < s; i++) of_end += dot(state.row(i), of_state.row(i), p);
  of_end *= chunk.decay[0];
  for (int64_t i = 0; i < count; i++) of_end += dot(chunk.b.row(i), to.of_b.row(i), s);
  multiply<float>(transposed(to.of_pairs), chunk.c, to.of_b, {count, s, count}, {.sum = Sum::onto});
  for (int64_t i = count - 1; i >= 0; i--) {  // a decay counts for all tokens from its own to the end
    of_end += dot(chunk.c.row(i), to.of_c.row(i), s) - dot(chunk.b.row(i), to.of_b.row(i), s);
    to.of_log[i] = of_end;
    for (int64_t j = 0; j < s; j += 16) {
      const f32x16 own = set1(to.of_own[i]), b = load(chunk.b.row(i) + j), c = load(chunk.c.row(i) + j);
      store(to.of_c.row(i) + j, fma(own, b, load(to.of_c.row(i) + j)));
      store(to.of_b.row(i) + j, fma(own, c, load(to.of_b.row(i) + j)));
    }
  }
}

// The gradients of x and of delta as a factor of it; returns that of D.
float gather_update(const SsdChunk& chunk, const SsdArgs& args, SsdGradients& to, Matrix<float> of_state,
                    const TensorView& grad_x, int64_t batch, int64_t head) {
  const int64_t count = chunk.count, p = args.p();
  const f32x16 d = set1(of_head(args.d, head));
  multiply<float>(chunk.b, of_state, to.written, {count, p, args.s()});
  multiply<float>(transposed(chunk.pairs), to.of_y, to.of_update, {count, p, count});
  float of_d = 0, until = 1;
  for (int64_t i = count - 1; i >= 0; i--) {
    const int64_t at = place_in(grad_x, batch, chunk.token + i, head);
    const f32x16 delta = set1(chunk.delta[i]);
    f32x16 of_delta = set1(0.0f);
    for (int64_t j = 0; j < p; j += 16) {
      const f32x16 update = fma(load(to.written.row(i) + j), set1(until), load(to.of_update.row(i) + j));
      of_delta = fma(load(to.x.row(i) + j), update, of_delta);
      store_from_float(grad_x.data, grad_x.dtype, at + j, p - j, fma(delta, update, mul(d, load(to.of_y.row(i) + j))));
    }
    to.of_delta[i] = sum(of_delta);
    until *= chunk.token_decay[i];
    of_d += dot(to.x.row(i), to.of_y.row(i), p);
  }
  return of_d;
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
