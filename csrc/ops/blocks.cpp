// SPDX-License-Identifier: Apache-2.0
#include "ops/blocks.hpp"

#include "ops/checks.hpp"
#include "ops/place.hpp"

namespace lowbit {

using enum ErrorKind;

namespace {

void check_bias(std::string_view op, const TensorView& bias, int64_t n) {
  if (!bias) return;
  check_activation(op, "bias", bias);
  check_tensor(op, "bias", bias, bias.dtype, {n});
}

void check_weight(std::string_view op, BlockedWeight& weight, int64_t format) {
  check(format == static_cast<int>(Format::nf4) || format == static_cast<int>(Format::fp4), value, op,
        ": format must be nf4 or fp4, got number ", format);
  weight.format = static_cast<Format>(format);
  const int64_t size = weight.block_size;
  check(size >= kSmallestBlock && size <= kLargestBlock && (size & (size - 1)) == 0, value, op,
        ": block_size must be a power of two from 32 to 4096, got ", size);
  check_tensor(op, "codes", weight.codes, DType::uint8, {ceil_div(weight.numel, 2)});
  const int64_t blocks = ceil_div(weight.numel, size);
  const bool nested = static_cast<bool>(weight.scale_codes);
  check(nested == static_cast<bool>(weight.code_map) && nested == static_cast<bool>(weight.offset), value, op,
        ": scale_codes, code_map and offset must be given together");
  check_tensor(op, "absmax", weight.absmax, DType::float32, {nested ? ceil_div(blocks, kNestedBlock) : blocks});
  if (!nested) return;
  check_tensor(op, "scale_codes", weight.scale_codes, DType::uint8, {blocks});
  check_tensor(op, "code_map", weight.code_map, DType::float32, {256});
  check(weight.offset.dtype == DType::float32 && weight.offset.numel() == 1, value, op,
        ": offset must be one float32, got ", name_of(weight.offset.dtype), " ", shape_text(weight.offset));
}

Place place_of_weight(std::string_view op, const BlockedWeight& weight, NamedTensor first, NamedTensor second,
                      const TensorView& bias) {
  return place_of(op, {first, second, {"bias", bias}, {"codes", weight.codes}, {"absmax", weight.absmax},
                       {"scale_codes", weight.scale_codes}, {"code_map", weight.code_map},
                       {"offset", weight.offset}});
}

}  // namespace

void blocks_linear(BlocksLinearArgs args, int64_t format) {
  constexpr std::string_view op = "blocks_linear";
  args.place = place_of_weight(op, args.weight, {"x", args.x}, {"y", args.y}, args.bias);
  check_activation(op, "x", args.x);
  check(args.x.rank == 2 && args.y.rank == 2, value, op, ": x and y must be [m, k] and [m, n], got ",
        shape_text(args.x), " and ", shape_text(args.y));
  check_contiguous(op, "x", args.x);
  const int64_t m = args.x.size(0), k = args.x.size(1), n = args.y.size(1);
  check(k % 8 == 0, value, op, ": k must be a multiple of 8, got ", k);
  check_tensor(op, "y", args.y, args.x.dtype, {m, n});
  args.weight.numel = n * k;
  check_weight(op, args.weight, format);
  check_bias(op, args.bias, n);
  if (m > 0 && n > 0) run(args);
}

void blocks_dequantize(BlocksDequantizeArgs args, int64_t format) {
  constexpr std::string_view op = "blocks_dequantize";
  args.place = place_of_weight(op, args.weight, {"out", args.out}, {"codes", args.weight.codes}, {});
  check_activation(op, "out", args.out);
  check_contiguous(op, "out", args.out);
  check_weight(op, args.weight, format);
  const int64_t numel = args.out.numel();
  check(args.begin >= 0 && args.begin % kSmallestBlock == 0 && args.begin + numel <= args.weight.numel, value, op,
        ": begin must be a multiple of 32 with all of out inside of numel=", args.weight.numel, ", got ", args.begin,
        " and ", numel, " elements");
  if (numel > 0) run(args);
}

void int8_linear(Int8LinearArgs args) {
  constexpr std::string_view op = "int8_linear";
  args.place = place_of(op, {{"x", args.x}, {"weight", args.weight}, {"row_scale", args.row_scale},
                             {"column_scale", args.column_scale}, {"bias", args.bias}, {"y", args.y}});
  check(args.x.rank == 2 && args.weight.rank == 2, value, op, ": x and weight must be [m, k] and [n, k], got ",
        shape_text(args.x), " and ", shape_text(args.weight));
  const int64_t m = args.x.size(0), k = args.x.size(1), n = args.weight.size(0);
  check_tensor(op, "x", args.x, DType::int8, {m, k});
  check_tensor(op, "weight", args.weight, DType::int8, {n, k});
  check_tensor(op, "row_scale", args.row_scale, DType::float32, {m});
  check_tensor(op, "column_scale", args.column_scale, DType::float32, {n});
  check_bias(op, args.bias, n);
  check_activation(op, "y", args.y);
  check_tensor(op, "y", args.y, args.y.dtype, {m, n});
  if (m > 0 && n > 0) run(args);
}

namespace {

int64_t bytes_of_weight(const BlockedWeight& weight) {
  return bytes_of(weight.codes) + bytes_of(weight.absmax) + bytes_of(weight.scale_codes) + bytes_of(weight.code_map);
}

}  // namespace

Call describe(const BlocksLinearArgs& args) {
  return Call{.arithmetic = Arithmetic::floating,
              .read = bytes_of(args.x) + bytes_of_weight(args.weight) + bytes_of(args.bias),
              .written = bytes_of(args.y),
              .operations = 2 * args.x.size(0) * args.weight.numel}
      .with(args.x, args.weight.codes, args.y);
}

Call describe(const BlocksDequantizeArgs& args) {
  const int64_t all = args.weight.numel;
  return Call{.read = all ? bytes_of_weight(args.weight) * args.out.numel() / all : 0, .written = bytes_of(args.out)}
      .with(args.weight.codes, args.out);
}

Call describe(const Int8LinearArgs& args) {
  return Call{.arithmetic = Arithmetic::integer,
              .read = bytes_of(args.x) + bytes_of(args.weight) + bytes_of(args.row_scale) +
                      bytes_of(args.column_scale) + bytes_of(args.bias),
              .written = bytes_of(args.y),
              .operations = 2 * args.y.numel() * args.x.size(1)}
      .with(args.x, args.weight, args.y);
}

}  // namespace lowbit
