// SPDX-License-Identifier: Apache-2.0
// Host code of linear for many rows. The weight is decoded to the dtype of the activations, or to int8, and multiplied
// by a library of the device, some columns and some rows at a time: memory stays bounded, and decoded weights stay in
// cache. A weight decoded to 16 bits is rounded once; codes with one scale per column are exact.
#pragma once

#include <algorithm>
#include <bit>

#include "cuda/linear/call.hpp"
#include "cuda/dense_product.hpp"
#include "gpu/refuses_format.hpp"
#include "ops/linear.hpp"

namespace lowbit::cuda {

constexpr int64_t kMaxDecoded = int64_t{128} << 20, kMaxProducts = int64_t{128} << 20;  // bytes

inline bool has_codes(const LinearArgs& args) { return !stays_float(args.x_format); }

// Whether products are the results: weights that are rounded anyway may include the scales of their columns, as long as
// they stay in the range of their dtype; then no epilogue is needed.
inline bool is_whole(const LinearArgs& args) {
  return args.dtype == DType::bfloat16 && args.x_format == XFormat::floating && args.weight_spec.group_size > 0 &&
         !args.bias && args.activation == Activation::none && !args.mul && !args.add;
}

// The division of a call, and its memory: in this order decoded weights, codes of x, scales and offsets of their rows,
// products, and the workspace of the library.
struct DecodedParts {
  int64_t padded_k, element, columns, rows;  // element: bytes per decoded weight
  int64_t codes, scales, products, library;  // byte offsets, multiples of 256

  explicit DecodedParts(const LinearArgs& args) {
    const WeightSpec& spec = args.weight_spec;
    padded_k = has_codes(args) ? round_up(spec.k, 16) : spec.k;
    element = has_codes(args) ? 1 : static_cast<int64_t>(size_of(args.dtype));
    const int64_t fitting = kMaxDecoded / (element * padded_k) / kPanelColumns * kPanelColumns;
    columns = std::min(spec.n, std::max<int64_t>(fitting, 4 * kPanelColumns));
    rows = is_whole(args) ? args.m : std::min(args.m, std::max<int64_t>(kMaxProducts / (4 * columns), 1));
    codes = round_up(element * columns * padded_k, 256);
    scales = codes + (has_codes(args) ? round_up(args.m * padded_k, 256) : 0);
    products = scales + 2 * bytes_of_scales(args);
    library = products + (is_whole(args) ? 0 : round_up(4 * columns * rows, 256));
  }
  static int64_t bytes_of_scales(const LinearArgs& args) { return has_codes(args) ? round_up(4 * args.m, 256) : 0; }
};

inline DecodedCall decoded_call(const LinearArgs& args, const DecodedParts& parts, void* memory) {
  char* const at = static_cast<char*>(memory);
  const LinearCall call{
      .spec = args.weight_spec, .sections = PanelLayout::sections(args.weight_spec), .weight = args.weight,
      .x = args.x, .m = args.m, .tiles = 0,
      .groups = static_cast<int32_t>(args.weight_spec.groups()), .group_shift = 0, .dtype = args.dtype,
      .bias_dtype = args.bias_dtype, .x_format = args.x_format, .activation = args.activation, .bias = args.bias,
      .mul = args.mul, .add = args.add, .y = args.y, .ordered = nullptr, .sums = nullptr,
      .row_scale = reinterpret_cast<float*>(at + parts.scales),
      .row_offset = reinterpret_cast<float*>(at + parts.scales + DecodedParts::bytes_of_scales(args))};
  const auto group = static_cast<uint64_t>(args.weight_spec.group_size);
  return {.call = call, .log2_of_group = group ? std::countr_zero(group) : 31, .first_column = 0, .columns = 0,
          .first_row = 0, .rows = 0, .padded_k = parts.padded_k, .decoded = at,
          .codes = reinterpret_cast<int8_t*>(at + parts.codes), .products = at + parts.products,
          .is_whole = is_whole(args)};
}

inline DenseProduct product_of(const LinearArgs& args, const DecodedCall& part) {
  const auto of_x = static_cast<int64_t>(size_of(args.dtype)) * part.first_row * part.padded_k;
  DenseProduct product{.m = part.rows, .n = part.columns, .k = part.padded_k, .dtype = args.dtype,
                       .x = static_cast<const char*>(args.x) + of_x, .w = part.decoded, .y = part.products,
                       .y_row = part.columns, .is_narrow = part.is_whole};
  if (part.is_whole) {
    product.y_row = args.weight_spec.n;
    product.y = static_cast<uint16_t*>(args.y) + part.first_row * product.y_row + part.first_column;
  }
  if (has_codes(args)) product.dtype = DType::int8, product.x = part.codes + part.first_row * part.padded_k;
  return product;
}

// Calls decode() for each range of columns, then multiply() for each range of rows.
template <class Decode, class Multiply>
void walk(const LinearArgs& args, const DecodedParts& parts, DecodedCall& part, Decode&& decode, Multiply&& multiply) {
  const int64_t n = args.weight_spec.n;
  for (part.first_column = 0; part.first_column < n; part.first_column += parts.columns) {
    part.columns = std::min(parts.columns, n - part.first_column);
    decode();
    for (part.first_row = 0; part.first_row < args.m; part.first_row += parts.rows) {
      part.rows = std::min(parts.rows, args.m - part.first_row);
      multiply();
    }
  }
}

// Calls body(product) for each, before memory exists: addresses have the alignment that they will have.
template <class Body>
void for_each_product(const LinearArgs& args, const DecodedParts& parts, Body&& body) {
  DecodedCall part = decoded_call(args, parts, reinterpret_cast<void*>(256));
  walk(args, parts, part, [] {}, [&] { body(product_of(args, part)); });
}

inline int64_t ctas_that_decode(const DecodedCall& part) {
  return ceil_div(ceil_div(part.columns, kPanelColumns) * ceil_div(part.padded_k, kTileK), kLinearWarps);
}
inline int64_t ctas_that_finish(const DecodedCall& part) { return part.rows * ceil_div(part.columns, kFinishedByCta); }

// A dense weight keeps its bits if activations have its own dtype, or float32.
inline bool keeps_weight(Format format, DType dtype) {
  switch (format) {
    case Format::float32: return dtype == DType::float32;
    case Format::bfloat16: return dtype != DType::float16;
    case Format::float16: return dtype != DType::bfloat16;
    default: return !is_float(format) || dtype == DType::float32;
  }
}

// Why activations are unsuitable, before the library is asked, or "".
inline std::string_view refuses_decoded(const LinearArgs& args) {
  if (args.low_rank) return kNoLowRank;
  if (args.x_format != XFormat::floating) return "activations that are rounded to codes";
  if (!keeps_weight(args.weight_spec.format, args.dtype)) return "a dense weight of another dtype";
  return gpu::refuses_format(args.weight_spec.format);
}
inline std::string_view refuses_decoded_codes(const LinearArgs& args) {
  const WeightSpec& spec = args.weight_spec;
  if (args.low_rank) return kNoLowRank;
  if (stays_float(args.x_format)) return "float activations";
  if (args.x_format == XFormat::int8_group && spec.group_size) return "a scale for each group of activations";
  if (spec.group_size || spec.asymmetric) return "a weight with groups or zero points";
  return spec.k > kMaxCodesK ? "k above 131072: an int32 cannot hold the sum" : gpu::refuses_format(spec.format);
}

}  // namespace lowbit::cuda
