// SPDX-License-Identifier: Apache-2.0
// The loop of the op gather_linear over the tasks of families (families.hpp): for each pass, prepares all pieces, then
// multiplies all tasks. All passes are regions of one team: one parallel region per call.
#pragma once

#include "cpu/linear/families.hpp"
#include "cpu/linear/weight_order.hpp"
#include "ops/gather_linear.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

inline void gather_pass(const GatherLinearArgs& args, const WeightOrder& order, const PassProduct& product) {
  const Weights weights{args.weight_spec, args.weight, args.bias};
  const XView x{.x = args.x.data, .dtype = args.x.dtype, .format = args.x_format, .k = weights.spec.k,
                .index = order.x_row};
  Arena counted;
  product.make(x, 0, counted);
  const Scratch memory(counted.bytes);
  Arena arena = memory.arena();
  product.make(x, 0, arena);
  product.prepare();
  product.for_tasks(weights.spec.panels(), [&](const RangeTask& task, const RangeTask& next) {
    const RowRange& range = product.range(task.r);
    Sink sink = weights.sink(range.weight, args.y.data, args.y.dtype, weights.spec.n);
    sink.index = order.y_row + range.first;
    const uint8_t* const upcoming = weights.panel(product.range(next.r).weight, next.part.begin);
    product.multiply(task.r, weights.weight(range.weight, upcoming), sink, task.block, task.part);
  });
}

constexpr int64_t kPassRows = 1024;

inline void gather_passes(const GatherLinearArgs& args, const WeightOrder& order, ChooseFamily choose) {
  const WeightSpec& spec = args.weight_spec;
  Arena counted;
  const int64_t most = smaller(kPassRows, args.rows());
  counted.array<RowRange>(most), counted.array<RangeProduct>(most);
  const Scratch memory(counted.bytes);
  Arena arena = memory.arena();
  RowRange* const ranges = arena.array<RowRange>(most);
  RangeProduct* const products = arena.array<RangeProduct>(most);
  int64_t count = 0, rows = 0;
  for (int64_t e = 0; e < args.weights(); e++) {
    const int64_t first = order.begin[e], rows_of_e = order.begin[e + 1] - first;
    if (rows_of_e == 0) continue;
    const Family& family = choose(spec, args.x_format, args.x.dtype, rows_of_e);
    const RowTiles parts(rows_of_e, family.pass);
    for (int64_t part = 0; part < parts.count; part++) {
      products[count].family = &family;
      ranges[count++] = {e, first + parts.begin(part), parts.height(part)};
      rows += parts.height(part);
      if (rows < kPassRows) continue;
      gather_pass(args, order, PassProduct(spec, ranges, products, count));
      count = rows = 0;
    }
  }
  if (count) gather_pass(args, order, PassProduct(spec, ranges, products, count));
}

inline void gather_by(const GatherLinearArgs& args, ChooseFamily choose) {
  const auto lists = [&](Arena& arena) {
    return WeightOrder{.begin = arena.array<int32_t>(args.weights() + 1), .y_row = arena.array<int32_t>(args.rows()),
                       .x_row = arena.array<int32_t>(args.rows())};
  };
  Arena counted;
  lists(counted);
  const Scratch memory(counted.bytes);
  Arena arena = memory.arena();
  const WeightOrder order = lists(arena);
  sort_rows(args, order);
  auto run = [&] { gather_passes(args, order, choose); };
  threads_for_products(args.rows(), args.weight_spec) > 1 ? as_team(run) : run();
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
