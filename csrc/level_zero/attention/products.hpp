// SPDX-License-Identifier: Apache-2.0
// Tiles of attention as factors of dpas, bfloat16 or float16. Scores are distributed over lanes by key: key_of(lane, j)
// is the key of a lane's j-th score, so that two or four bytes per lane of 16-bit probabilities are the first factor of
// the next product as computed. Columns are padded with zeros to those of the kernel.
#pragma once

#include "level_zero/attention/running.hpp"
#include "level_zero/device/matrix.hpp"
#include "level_zero/device/specialise.hpp"

namespace lowbit::level_zero {

constexpr int kStep = 16;                  // depth of one dpas
constexpr int kLaneScores = kKvTile / kLanes;  // scores per lane and row
constexpr int kPerPiece = kStep / kLanes;  // 16-bit floats per lane and row of the first factor
constexpr int kTileSteps = kKvTile / kStep;

LOWBIT_INLINE bool is_float16() { return specialised(0, 0) != 0; }
LOWBIT_INLINE uint16_t bits_of(float value) {
  return is_float16() ? half_of_float(value) : bfloat16_from_float(value);
}

LOWBIT_INLINE int key_of(int lane, int j) { return j / kPerPiece * kStep + lane * kPerPiece + j % kPerPiece; }

template <int kRows>
LOWBIT_INLINE void multiply_add(Rows<float, kRows>& sum, Rows<RowPiece, kRows> a, i32x8 b) {
  if (is_float16()) sum = mad_f16(a, b, sum);
  else sum = mad_bf16(a, b, sum);
}

// Rows of a head in global memory, from `first` on. wide: rows begin at multiples of 16 bytes. Missing rows and columns
// read another one, which counts as 0: no branch per element.
struct HeadReader {
  const uint16_t* begin;
  int64_t stride;
  int columns, first = 0, rows = 0;
  bool wide;

  LOWBIT_INLINE HeadReader(const gpu::HeadRows& of, int b, int h, int columns)
      : begin(static_cast<const uint16_t*>(of.data) + b * of.batch + h * of.head), stride(of.row), columns(columns),
        wide((reinterpret_cast<uint64_t>(begin) | static_cast<uint64_t>(stride) * 2) % 16 == 0) {}

  LOWBIT_INLINE const Global<uint16_t>* row(int r) const {
    return global<uint16_t>(begin + (first + (r < rows ? r : rows - 1)) * stride);
  }
  LOWBIT_INLINE uint32_t at(int r, int column) const {
    const uint32_t bits = row(r)[column < columns ? column : columns - 1];
    return r < rows && column < columns ? bits : 0;
  }
  // Whether eight columns from a multiple of 8 on can be read at once.
  LOWBIT_INLINE bool has_eight(int column) const { return wide && column + 8 <= columns; }
  LOWBIT_INLINE u32x4 eight(int r, int column) const {
    const u32x4 words = *(const Global<u32x4>*)(row(r) + column);  // NOLINT: no other cast can
    return r < rows ? words : 0;
  }
};

LOWBIT_INLINE i32x8 joined(const u32x4 (&halves)[2]) {
  return __builtin_bit_cast(i32x8, __builtin_shufflevector(halves[0], halves[1], 0, 1, 2, 3, 4, 5, 6, 7));
}

// A tile of rows as the second factor, with their columns as depth: a row is a column of the product, 16 at a time.
template <int kColumns>
struct RowFactor {
  alignas(16) u32x4 data[kColumns / kStep][kKvTile][2];

  LOWBIT_INLINE void load(const HeadReader& from) {
    for (int at = static_cast<int>(threadIdx.x); at < times(kKvTile * kColumns / 8); at += kAttentionThreads) {
      const int row = at / (kColumns / 8), eight = at % (kColumns / 8);
      u32x4& to = data[eight / 2][row][eight % 2];
      if (from.has_eight(eight * 8)) to = from.eight(row, eight * 8);
      else for (int i = 0; i < times(8); i++) reinterpret_cast<uint16_t*>(&to)[i] = from.at(row, eight * 8 + i);
    }
  }
  LOWBIT_INLINE i32x8 factor(int step, int row) const { return joined(data[step][row]); }
};

// The same with rows as depth: 16 rows at a time of each column, in pairs.
template <int kColumns>
struct PairFactor {
  alignas(16) u32x4 data[kTileSteps][kColumns][2];

  LOWBIT_INLINE void load(const HeadReader& from) {
    for (int at = static_cast<int>(threadIdx.x); at < times(kKvTile / 2 * kColumns / 8); at += kAttentionThreads) {
      const int pair = at / (kColumns / 8), column = at % (kColumns / 8) * 8;
      if (!from.has_eight(column)) {
        for (int i = 0; i < times(16); i++)
          reinterpret_cast<uint16_t*>(data[pair / 8][column + i / 2])[pair % 8 * 2 + i % 2] =
              from.at(pair * 2 + i % 2, column + i / 2);
        continue;
      }
      const u32x4 low = from.eight(pair * 2, column), high = from.eight(pair * 2 + 1, column);
      const u32x4 even = (low & 0xffffu) | high << 16u, odd = low >> 16u | (high & 0xffff0000u);
#pragma unroll
      for (int i = 0; i < 8; i++)
        reinterpret_cast<uint32_t*>(data[pair / 8][column + i])[pair % 8] = i % 2 ? odd[i / 2] : even[i / 2];
    }
  }
  LOWBIT_INLINE i32x8 factor(int step, int column) const { return joined(data[step][column]); }
};

// Rows of a sub-group as the first factor, in local memory: each lane writes and reads its own part.
template <int kRows, int kColumns>
struct OwnRows {
  Rows<RowPiece, kRows> piece[kColumns / kStep][kAttentionThreads];

  LOWBIT_INLINE void load(const HeadReader& from, int lane) {
    for (int step = 0; step < times(kColumns / kStep); step++) {
      Rows<RowPiece, kRows> a;
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        const int column = step * kStep + lane * kPerPiece;
        uint32_t bits = from.at(r, column);
        if (kPerPiece == 2) bits |= from.at(r, column + 1) << 16;
        a[r] = static_cast<RowPiece>(bits);
      }
      piece[step][threadIdx.x] = a;
    }
  }
};

template <int kRows>
using LaneScores = Rows<float, kRows>[kLaneScores];
template <int kRows>
using ScoreMemory = Rows<float, kRows>[kLaneScores][kAttentionThreads];

// value = each(j, r, value) for the j-th score of each row r of this lane, in a loop over local memory: the code for a
// score exists once.
template <int kRows, class Each>
LOWBIT_INLINE void for_each_score(LaneScores<kRows>& s, ScoreMemory<kRows>& memory, Each each) {
  const auto thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int j = 0; j < kLaneScores; j++) memory[j][thread] = s[j];
  for (int i = 0; i < times(kLaneScores * kRows); i++) {
    float& value = reinterpret_cast<float*>(&memory[i / kRows][thread])[i % kRows];
    value = each(i / kRows, i % kRows, value);
  }
#pragma unroll
  for (int j = 0; j < kLaneScores; j++) s[j] = memory[j][thread];
}

template <int kRows, int kColumns>
LOWBIT_INLINE void multiply_rows(LaneScores<kRows>& s, const OwnRows<kRows, kColumns>& rows,
                                 const RowFactor<kColumns>& tile, int lane, int columns) {
#pragma unroll
  for (int j = 0; j < kLaneScores; j++) s[j] = 0;
  for (int step = 0; step * kStep < columns; step++) {
    const Rows<RowPiece, kRows> a = rows.piece[step][threadIdx.x];
#pragma unroll
    for (int j = 0; j < kLaneScores; j++) multiply_add<kRows>(s[j], a, tile.factor(step, key_of(lane, j)));
  }
}

// sums += p times the rows of the tile.
template <int kRows, int kColumns>
LOWBIT_INLINE void multiply_onto(Rows<float, kRows> (&sums)[kColumns / kLanes], const LaneScores<kRows>& p,
                                 const PairFactor<kColumns>& tile, int lane) {
#pragma unroll
  for (int step = 0; step < kTileSteps; step++) {
    Rows<RowPiece, kRows> a;
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      uint32_t bits = bits_of(p[step * kPerPiece][r]);
      if (kPerPiece == 2) bits |= static_cast<uint32_t>(bits_of(p[step * kPerPiece + kPerPiece - 1][r])) << 16;
      a[r] = static_cast<RowPiece>(bits);
    }
#pragma unroll
    for (int c = 0; c < kColumns / kLanes; c++)
      multiply_add<kRows>(sums[c], a, tile.factor(step, c * kLanes + lane));
  }
}

}  // namespace lowbit::level_zero
