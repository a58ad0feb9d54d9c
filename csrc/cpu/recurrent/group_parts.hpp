// SPDX-License-Identifier: Apache-2.0
// Gradients of B and C, which the heads or channels of a group share. Tasks add theirs to parts, of which a group has a
// number that no number of threads changes; the parts are added in order.
#pragma once

#include "core/parallel.hpp"
#include "cpu/recurrent/sequences.hpp"
#include "cpu/tile_products.hpp"
#include "cpu/vector_io.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

struct GroupParts {
  int64_t count;             // the number of parts of a group
  int64_t of_batch, tokens;  // the number of tokens of an entry of the batch, and of all
  Matrix<float> of_b, of_c;  // [groups, parts, tokens, S]

  template <class Args>
  GroupParts(TileArena& arena, const Args& args, int64_t count)
      : count(count), of_batch(args.tokens()), tokens(args.batch() * args.tokens()),
        of_b(arena.matrix<float>(args.groups() * count * tokens, args.s())),
        of_c(arena.matrix<float>(args.groups() * count * tokens, args.s())) {}

  // Where the tokens of a sequence begin in a part.
  int64_t row_of(const Sequence& sequence, int64_t group, int64_t part) const {
    return (group * count + part) * tokens + sequence.batch * of_batch + sequence.begin;
  }
};

// The sum of the parts of B's or C's gradient at the tokens of a sequence.
void store_sums(const TensorView& grad, const GroupParts& parts, Matrix<float> from, const Sequence& sequence,
                int64_t group) {
  const int64_t s = grad.size(3), first = parts.row_of(sequence, group, 0);
  for (int64_t token = sequence.begin; token < sequence.end; token++) {
    const int64_t at = place_in(grad, sequence.batch, token, group);
    for (int64_t j = 0; j < s; j += 16) {
      f32x16 total = set1(0.0f);
      for (int64_t i = 0; i < parts.count; i++)
        total = add(total, load(from.row(first + i * parts.tokens + token - sequence.begin) + j));
      store_from_float(grad.data, grad.dtype, at + j, s - j, total);
    }
  }
}

// The gradients of B and C.
template <class BackwardArgs>
void store_parts(const BackwardArgs& args, const GroupParts& parts, int threads) {
  const int64_t groups = args.forward.groups();
  parallel_for(args.forward.sequences() * groups, threads, [&](int64_t task) {
    const Sequence sequence(args.forward, task / groups);
    store_sums(args.grad_b, parts, parts.of_b, sequence, task % groups);
    store_sums(args.grad_c, parts, parts.of_c, sequence, task % groups);
  });
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
