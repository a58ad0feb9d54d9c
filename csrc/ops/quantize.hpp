// SPDX-License-Identifier: Apache-2.0
// quantize, dequantize: between float weights [n, k] and the packed panels of formats/format.hpp; repack: between
// layouts; embedding: dequantize of some rows, from any layout.
#pragma once

#include <string_view>

#include "core/tensor_view.hpp"
#include "formats/gguf_blocks.hpp"
#include "formats/layout.hpp"
#include "formats/scales.hpp"
#include "ops/kernel.hpp"

namespace lowbit {

inline constexpr std::string_view kMappingNames[] = {"symmetric", "symmetric_no_clipping_err", "asymmetric"};

// absmax: the scale given by the mapping; search: the scale and zero point with the least error of many candidates per
// group, that of absmax among them (formats/scale_search.hpp).
enum class ScaleChoice : int { absmax, search };
inline constexpr std::string_view kScaleChoiceNames[] = {"absmax", "search"};

// Sums of w * w, of (w - dequantized)^2, and of the latter for absmax; if an importance is given, each term is
// multiplied by that of its k, divided by a power of two.
struct Distortion {
  double signal = 0, noise = 0, absmax_noise = 0;
  LOWBIT_INLINE void operator+=(const Distortion& other) {
    signal += other.signal, noise += other.noise, absmax_noise += other.absmax_noise;
  }
};

struct QuantizeArgs {
  Place place{};
  WeightSpec spec;
  Mapping mapping = Mapping::symmetric;
  ScaleChoice scale = ScaleChoice::absmax;
  TensorView weight;                // [n, k] float32, bfloat16 or float16, contiguous, finite
  TensorView importance;            // float32 [k], contiguous, finite, not negative; or none: all k weigh the same
  TensorView packed;                // uint8 [panels, panel_bytes], contiguous: written
  Distortion* distortion = nullptr;  // written

  LOWBIT_INLINE bool searches() const { return scale == ScaleChoice::search; }
};

// A weight of MXFP4 (OCP Microscaling 1.0) as files store it: blocks of 32 e2m1 codes of a row, each with a power of
// two.
struct Mxfp4Blocks {
  TensorView codes{};   // uint8 [n, k / 32, 16], two codes in a byte; rows and blocks may lie apart
  TensorView scales{};  // uint8 [n, k / 32], e8m0: 2^(scale - 127); likewise
  bool halves = false;  // the low nibbles of a block are its first half (GGUF); else two neighbours share a byte
  bool* nan = nullptr;  // written: whether a scale is 255

  explicit operator bool() const { return static_cast<bool>(codes); }
};

// What is wrong with blocks of GGUF: a scale or a minimum that is inf or nan, or scales of a row that differ by more
// than 2^24.
enum class GgufFault : int { none, scale, minimum, range };

// A weight as a GGUF file stores it (formats/gguf_blocks.hpp).
struct GgufBlocks {
  GgufType type = GgufType::Q4_0;
  TensorView blocks{};  // uint8 [n, k / weights of a block, bytes of a block]; rows and blocks may lie apart
  TensorView places{};  // int32 [groups], the group of the weight that each group of a row becomes; or none: the same
  int* fault = nullptr;  // written: the GgufFault of a row, if there is any

  explicit operator bool() const { return static_cast<bool>(blocks); }
};

// A packed weight from one layout (formats/layout.hpp) to another, or from blocks to the layout of the kernels.
struct RepackArgs {
  Place place{};
  WeightSpec spec;
  Layout layout = Layout::row_major, out_layout = Layout::x86_panel_16x64;
  TensorView packed;  // uint8, in the shape of its layout, contiguous
  TensorView out;     // likewise: written
  Sections from{}, to{};  // sections of the layouts, set by repack()
  Mxfp4Blocks blocks{};   // in place of `packed`
  GgufBlocks gguf{};      // likewise
};

// A whole weight as float32 [n, k], or the rows named by `indices`: out[i, :] = w[indices[i], :], from any layout,
// rounded to the dtype of out.
struct DequantizeArgs {
  Place place{};
  WeightSpec spec;
  TensorView packed;  // see RepackArgs
  TensorView out;     // [n, k] or [*indices, k], float32, bfloat16 or float16, contiguous: written
  TensorView indices{};  // int32 or int64, contiguous; or none
  Layout layout = kKernelLayout;
  Sections sections{};         // sections of the layout, set by embedding()
  int64_t* outside = nullptr;  // written: position of an index outside 0..n-1
};

// Whether a contiguous float32, bfloat16 or float16 tensor is free of inf and nan.
struct AllFiniteArgs {
  Place place{};
  TensorView tensor;
  bool* result = nullptr;
};

// mapping and scale are enumerators of the lists above.
LOWBIT_API Distortion quantize(const TensorView& weight, const TensorView& packed, const WeightSpec& spec,
                               int64_t mapping, int64_t scale = 0, const TensorView& importance = {});
LOWBIT_API Layout layout(std::string_view op, int64_t number);
LOWBIT_API Sections sections(Layout layout, const WeightSpec& spec);
LOWBIT_API void repack(RepackArgs args);
// Packs fp4_e2m1 in groups of 32. A block is exact if its scale is within 2^39 of the largest of its row, and 0 else.
LOWBIT_API void pack_mxfp4(Mxfp4Blocks blocks, const TensorView& out);
LOWBIT_API void pack_gguf(const TensorView& blocks, int64_t type, const TensorView& places, const TensorView& out);
LOWBIT_API WeightSpec gguf_spec(GgufType type, int64_t n, int64_t k);
// Checks all arguments but `out`.
LOWBIT_API DequantizeArgs dequantize_args(const TensorView& weight, const WeightSpec& spec, DType dtype);
// Checks the arguments of a look-up; the look-up itself raises an error for an index outside 0..n-1.
LOWBIT_API DequantizeArgs embedding_args(const TensorView& weight, const TensorView& indices, const WeightSpec& spec,
                                         int64_t layout, DType dtype);
LOWBIT_API void embedding(DequantizeArgs args);
LOWBIT_API bool all_finite(const TensorView& tensor);

LOWBIT_API Call describe(const QuantizeArgs& args);
LOWBIT_API Call describe(const RepackArgs& args);
LOWBIT_API Call describe(const DequantizeArgs& args);
LOWBIT_API Call describe(const AllFiniteArgs& args);

}  // namespace lowbit
