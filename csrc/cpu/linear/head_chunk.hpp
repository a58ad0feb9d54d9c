// SPDX-License-Identifier: Apache-2.0
// Some columns of the vocabulary at a time, in the forms in which both products of linear_cross_entropy take a head:
// panels, for the families of product.hpp, and rows of float32, for the product back to hidden states. A float head
// becomes panels of float32 here, whatever its dtype; panels of a packed head are read where they lie.
#pragma once

#include "cpu/linear/families.hpp"
#include "cpu/tile_products.hpp"
#include "ops/linear_cross_entropy.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kChunkPanels = 8, kChunk = kChunkPanels * kPanelColumns;

// The weight that families of the head are made for.
LOWBIT_INLINE WeightSpec product_spec(const LinearCrossEntropyArgs& args) {
  WeightSpec spec = args.spec;
  if (!args.packed()) spec.format = Format::float32;
  return spec;
}

class HeadChunk {
 public:
  // decodes: whether rows() is asked for.
  HeadChunk(const LinearCrossEntropyArgs& args, bool decodes, TileArena& arena)
      : args_(args), decodes_(decodes || !args.packed()), spec_(product_spec(args)) {
    if (decodes_) rows_ = arena.matrix<float>(kChunk, spec_.padded_k());
    if (!args.packed()) panels_ = arena.array<float>(kChunk * spec_.padded_k());
  }

  // Reads panels `chunk`, at most kChunkPanels.
  void read(Span chunk) {
    chunk_ = chunk;
    spec_.n = smaller(args_.spec.n - first(), kChunk);
    if (!args_.packed()) {
      for (int64_t panel = 0; panel < count(); panel++) widen_rows(panel), transpose_rows(panel);
    } else if (decodes_) {
      for (int64_t panel = 0; panel < count(); panel++) decode(panel);
    }
  }

  int64_t first() const { return chunk_.begin * kPanelColumns; }  // first column
  int64_t count() const { return chunk_.count(); }                // panels
  int64_t columns() const { return spec_.n; }
  const WeightSpec& spec() const { return spec_; }
  Matrix<float> rows() const { return rows_; }  // [columns, padded k], zero behind the last column and k

  // A weight of these columns alone.
  PackedWeight weight() const {
    if (!args_.packed()) return {spec_, reinterpret_cast<const uint8_t*>(panels_)};
    return {spec_, args_.head.as<const uint8_t>() + chunk_.begin * spec_.panel_bytes()};
  }
  // Where its products go, [rows, kChunk], with the bias.
  Sink sink(float* y) const {
    const TensorView& bias = args_.bias;
    const int64_t at = bias ? first() * static_cast<int64_t>(size_of(bias.dtype)) : 0;
    return {.y = y, .dtype = DType::float32, .stride = kChunk,
            .bias = bias ? bias.as<const char>() + at : nullptr, .bias_dtype = bias.dtype};
  }

 private:
  void widen_rows(int64_t panel) const {
    const TensorView& head = args_.head;
    const int64_t k = spec_.k;
    for (int64_t row = panel * kPanelColumns; row < (panel + 1) * kPanelColumns; row++) {
      const int64_t begin = (first() + row) * k;
      for (int64_t i = 0; i < spec_.padded_k(); i += 16)
        store(rows_.row(row) + i,
              row < columns() && i < k ? load_as_float(head.data, head.dtype, begin + i, k - i) : set1(0.0f));
    }
  }
  void transpose_rows(int64_t panel) const {
    float* const to = panels_ + panel * kPanelColumns * spec_.padded_k();
    for (int64_t i = 0; i < spec_.padded_k(); i += 16)
      transpose_16x16(rows_.row(panel * kPanelColumns) + i, rows_.stride, to + i * 16, 16);
  }
  void decode(int64_t panel) const {
    const uint8_t* const data = weight().data;
    const f32x16 scale = is_float(spec_.format)
                             ? set1(1.0f)
                             : load(reinterpret_cast<const float*>(data + panel * spec_.panel_bytes() +
                                                                   spec_.column_scale_at()));
    with_format(spec_.format, [&]<Format kFormat>() {
      with_step<read_as(kFormat)>(spec_, [&](auto kStep) {
        alignas(64) float wide[kTileK * 16];
        for (int64_t tile = 0; tile < spec_.tiles(); tile++) {
          widen_tiles<read_as(kFormat), kStep>(spec_, data, panel, tile, 1, wide);
          for (int64_t i = 0; i < kTileK * 16; i += 16) store(wide + i, mul(load(wide + i), scale));
          for (int64_t i = 0; i < kTileK; i += 16)
            transpose_16x16(wide + i * 16, 16, rows_.row(panel * kPanelColumns) + tile * kTileK + i, rows_.stride);
        }
      });
    });
  }

  const LinearCrossEntropyArgs& args_;
  const bool decodes_;
  WeightSpec spec_;  // n: the columns of the chunk
  Span chunk_{};
  Matrix<float> rows_{};
  float* panels_ = nullptr;  // [panels][padded k][16]: float32 panels (formats/float32.hpp)
};

// Rows of x, prepared by a family for products with chunks.
class LossRows {
 public:
  LossRows(const LinearCrossEntropyArgs& args, const Family& family, const int32_t* index, int64_t count)
      : family_(family), spec_(product_spec(args)),
        x_{.x = args.x.data, .dtype = args.x.dtype, .format = args.x_format, .k = spec_.k, .index = index},
        memory_(bytes(count)) {
    Arena arena = memory_.arena();
    family_.make(rows_, x_, spec_, count, arena);
    for (int64_t piece = 0; piece < family_.pieces(rows_); piece++) family_.prepare(rows_, spec_, piece);
  }

  // y [rows, kChunk] = x @ chunk.T + bias
  void multiply(const HeadChunk& chunk, float* y) const {
    const RowBlocks blocks = family_.blocks(rows_, chunk.spec());
    for (int64_t block = 0; block < blocks.count; block++)
      family_.multiply(rows_, chunk.weight(), chunk.sink(y), blocks.at(block), {0, chunk.count()});
  }

 private:
  int64_t bytes(int64_t count) {
    Arena counted;
    family_.make(rows_, x_, spec_, count, counted);
    return counted.bytes;
  }

  const Family& family_;
  const WeightSpec spec_;
  const XView x_;
  alignas(8) char rows_[kRowsBytes] = {};
  const Scratch memory_;
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
