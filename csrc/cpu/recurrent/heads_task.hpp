// SPDX-License-Identifier: Apache-2.0
// Tasks of recurrent ops: heads of a sequence, and columns of their states, do not depend on each other.
#pragma once

#include "core/parallel.hpp"
#include "core/scratch.hpp"
#include "cpu/loops.hpp"
#include "cpu/tile_products.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kStrip = 16 * kFloatPanels;  // columns of a state that are stepped together

// A few heads of a sequence, and columns of their states.
struct HeadsTask {
  int64_t sequence;
  Span heads, columns;
};

// Calls run(task, memory) for the tasks of states [rows, columns], with a HeadMemory(arena, args, max heads of a task).
template <class HeadMemory, class Args, class Run>
void for_heads_tasks(const Args& args, int64_t rows, int64_t columns, int threads, Run&& run) {
  const int64_t sequences = args.sequences(), heads = args.heads(), strips = ceil_div(columns, kStrip);
  if (sequences == 0) return;
  const int64_t wanted = ceil_div(2 * threads, sequences);  // tasks of a sequence
  // Heads that are neighbours in memory are one task, as many as half of L2 has room for.
  const int64_t room = larger(1, kL2Block / (rows * columns * int64_t{sizeof(float)}));
  const RowTiles groups(heads, larger(1, smaller(room, heads / wanted)));
  const RowTiles parts(strips, ceil_div(strips, smaller(strips, ceil_div(wanted, groups.count))));
  const int64_t most = ceil_div(heads, groups.count), bytes = HeadMemory({}, args, most).bytes;
  parallel_for(sequences * groups.count * parts.count, threads, [&](int64_t number) {
    const int64_t part = number % parts.count, group = number / parts.count % groups.count;
    const Scratch scratch(bytes);
    HeadMemory memory(scratch.arena(), args, most);
    run(HeadsTask{number / parts.count / groups.count,
                  {groups.begin(group), groups.begin(group + 1)},
                  {parts.begin(part) * kStrip, smaller(parts.begin(part + 1) * kStrip, columns)}},
        memory);
  });
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
