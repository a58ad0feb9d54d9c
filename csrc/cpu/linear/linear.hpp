// SPDX-License-Identifier: Apache-2.0
// The loop of the op linear over the tasks of a family (product.hpp): rows are prepared one pass at a time, which
// bounds the scratch memory, and panels are scheduled dynamically in chunks. One parallel region per call: preparing
// and multiplying are phases of a team.
#pragma once

#include "cpu/linear/activations.hpp"
#include "cpu/linear/schedule.hpp"
#include "ops/linear.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

LOWBIT_INLINE XView x_of(const LinearArgs& args) {
  return {.x = args.x, .dtype = args.dtype, .format = args.x_format, .k = args.weight_spec.k};
}

LOWBIT_INLINE Sink sink_of(const LinearArgs& args) {
  return {.y = args.y, .dtype = args.dtype, .stride = args.weight_spec.n, .bias = args.bias,
          .bias_dtype = args.bias_dtype, .activation = args.activation, .mul = args.mul, .add = args.add,
          .low_rank = args.low_rank ? &args.low_rank : nullptr};
}

template <class Rows>
void linear_pass(const PackedWeight& weight, const XView& x, const Sink& sink, int64_t count, int threads) {
  const WeightSpec& spec = weight.spec;
  Arena counted;
  Rows(x, spec, count, counted);
  const Scratch memory(counted.bytes);
  Arena arena = memory.arena();
  const Rows rows(x, spec, count, arena);
  parallel_for(rows.pieces(), threads_for(count * spec.padded_k()), [&](int64_t piece) { rows.prepare(spec, piece); });
  const int64_t panels = spec.panels(), chunk = Rows::kCut.chunk(panels, threads), chunks = ceil_div(panels, chunk);
  const auto blocks = rows.blocks(spec);
  parallel_for(blocks.count * chunks, threads, [&](int64_t task) {
    rows.multiply(weight, sink, blocks.at(task / chunks), piece_of(panels, chunk, task % chunks));
  });
}

template <class Rows>
void linear_by(const LinearArgs& args) {
  const PackedWeight weight{args.weight_spec, args.weight};
  const XView x = x_of(args);
  const Sink sink = sink_of(args);
  const int threads = threads_for_products(args.m, weight.spec);
  auto run = [&] {
    for (int64_t first = 0; first < args.m; first += Rows::kPass)
      linear_pass<Rows>(weight, x.from(first), sink.from(first), smaller(int64_t{Rows::kPass}, args.m - first),
                        threads);
  };
  // One region: a single phase needs no team.
  const int64_t passes = ceil_div(args.m, int64_t{Rows::kPass}), count = smaller(int64_t{Rows::kPass}, args.m);
  Arena counted;
  const bool all_prepare = Rows(x, weight.spec, count, counted).pieces() > 1 &&
                           threads_for(count * weight.spec.padded_k()) > 1;
  passes * (all_prepare + (threads > 1)) > 1 ? as_team(run) : run();
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
