// SPDX-License-Identifier: Apache-2.0
// A product of activations and a packed weight, in four parts with separate memory, so that any loop can combine them:
// linear.hpp for one weight, gather.hpp for one of many weights per row.
//
//   XView         rows of x as passed by the caller
//   PackedWeight  panels of one weight
//   Sink          the destination: y with its epilogue (epilogue.hpp)
//   Rows          a family of micro-kernels: prepared rows of x, and the tasks on them. A family has
//     Rows(x, spec, count, arena)      memory for `count` rows, at most kPass
//     pieces(), prepare(spec, piece)   the preparation: piece by piece, on any thread
//     blocks(spec)                     the rows cut into RowBlocks; a task has the rows of one block
//     multiply(weight, sink, block, panels)   a task: opens no region, uses its own memory
//     kCut                             how panels are cut into tasks (schedule.hpp)
//     Rows(all, index, count)          optional: prepared rows of another Rows, by index
// Integer families give the same bits however the work is cut; the sums of float families depend on the number of rows
// in a Rows, and on the index of a row among them, but on no value of another row.
#pragma once

#include "core/dtype.hpp"
#include "formats/format.hpp"
#include "ops/linear_formats.hpp"
#include "cpu/loops.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// Rows of x [..., k]: row r is row index[r] of x, or without an index row first + r.
struct XView {
  const void* x;
  DType dtype;
  XFormat format;
  int64_t k;
  int64_t first = 0;
  const int32_t* index = nullptr;

  LOWBIT_INLINE int64_t begin(int64_t row) const { return (index ? index[row] : first + row) * k; }
  LOWBIT_INLINE XView from(int64_t row) const {
    XView rest = *this;
    if (index) rest.index += row;
    else rest.first += row;
    return rest;
  }
};

struct PackedWeight {
  WeightSpec spec;
  const uint8_t* data;            // [panels][panel_bytes]
  const uint8_t* next = nullptr;  // the panel that the thread takes after those of a task; null: the one behind them

  // Panel number `panel`, or where a task of `panels` ends before it the one that is taken then: to be prefetched.
  LOWBIT_INLINE const uint8_t* upcoming(Span panels, int64_t panel) const {
    return next && panel >= panels.end ? next : data + panel * spec.panel_bytes();
  }
};

// Range number `piece` of `count` elements cut into ranges of `length`.
LOWBIT_INLINE Span piece_of(int64_t count, int64_t length, int64_t piece) {
  return {piece * length, smaller(count, (piece + 1) * length)};
}

// `rows` rows cut into blocks of `length`.
struct RowBlocks {
  int64_t rows, length, count;
  LOWBIT_INLINE RowBlocks(int64_t rows, int64_t length) : rows(rows), length(length), count(ceil_div(rows, length)) {}
  LOWBIT_INLINE Span at(int64_t block) const { return piece_of(rows, length, block); }
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
