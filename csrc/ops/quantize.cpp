// SPDX-License-Identifier: Apache-2.0
#include "ops/quantize.hpp"

#include <utility>
#include <vector>

#include "ops/checks.hpp"
#include "ops/linear.hpp"
#include "ops/place.hpp"

namespace lowbit {

using enum ErrorKind;

Distortion quantize(const TensorView& weight, const TensorView& packed, const WeightSpec& spec, int64_t mapping,
                    int64_t scale, const TensorView& importance) {
  const Place place = place_of("quantize", {{"weight", weight}, {"packed", packed}, {"importance", importance}});
  check_activation("quantize", "weight", weight);
  check_tensor("quantize", "weight", weight, weight.dtype, {spec.n, spec.k});
  check_weight("quantize", packed, spec);
  check_number("quantize", "mapping", mapping, std::size(kMappingNames));
  check(is_float(spec.format) || (static_cast<Mapping>(mapping) == Mapping::asymmetric) == spec.asymmetric, value,
        "quantize: mapping must be ", spec.asymmetric ? "asymmetric" : "symmetric or symmetric_no_clipping_err",
        " with asymmetric=", spec.asymmetric, ", got ", kMappingNames[mapping]);
  const auto choice = static_cast<ScaleChoice>(check_number("quantize", "scale", scale, std::size(kScaleChoiceNames)));
  check(choice == ScaleChoice::absmax || !is_float(spec.format), value, "quantize: scale must be absmax for a ",
        kFormatNames[static_cast<int>(spec.format)], " weight, which has no scales to search for");
  check(choice == ScaleChoice::absmax || static_cast<Mapping>(mapping) != Mapping::symmetric_no_clipping_err, value,
        "quantize: scale must be absmax with mapping symmetric_no_clipping_err, got search: a searched scale may clip");
  if (importance) {
    check(choice == ScaleChoice::search, value,
          "quantize: importance must be None unless scale is search, got scale absmax");
    check_tensor("quantize", "importance", importance, DType::float32, {spec.k});
    check(all_finite(importance), value, "quantize: importance must be finite, got inf or nan");
  }
  check(all_finite(weight), value, "quantize: weight must be finite, got inf or nan");
  Distortion distortion;
  run(QuantizeArgs{.place = place,
                   .spec = spec,
                   .mapping = static_cast<Mapping>(mapping),
                   .scale = choice,
                   .weight = weight,
                   .importance = importance,
                   .packed = packed,
                   .distortion = &distortion});
  return distortion;
}

Layout layout(std::string_view op, int64_t number) {
  return static_cast<Layout>(check_number(op, "layout", number, std::size(kLayoutNames)));
}

Sections sections(Layout layout, const WeightSpec& spec) {
  return with_layout(layout, [&]<class Type>() { return Type::sections(spec); });
}

void repack(RepackArgs args) {
  args.place = place_of("repack", {{"packed", args.packed}, {"out", args.out}});
  args.from = sections(args.layout, args.spec), args.to = sections(args.out_layout, args.spec);
  check_tensor("repack", "packed", args.packed, DType::uint8, {args.from.rows, args.from.row_bytes});
  check_tensor("repack", "out", args.out, DType::uint8, {args.to.rows, args.to.row_bytes});
  run(args);
}

void pack_mxfp4(Mxfp4Blocks blocks, const TensorView& out) {
  constexpr std::string_view op = "pack_mxfp4";
  const Place place = place_of(op, {{"codes", blocks.codes}, {"scales", blocks.scales}, {"out", out}});
  for (const auto& [name, tensor] : {std::pair{"codes", &blocks.codes}, std::pair{"scales", &blocks.scales}})
    check(tensor->dtype == DType::uint8, type, op, ": ", name, " must be uint8, got ", name_of(tensor->dtype));
  const TensorView &codes = blocks.codes, &scales = blocks.scales;
  check(codes.rank == 3 && codes.size(2) == 16 && codes.stride[2] == 1, value, op,
        ": codes must have shape [n, k / 32, 16] with 16 neighbouring bytes, got ", shape_text(codes));
  check(scales.rank == 2 && scales.size(0) == codes.size(0) && scales.size(1) == codes.size(1), value, op,
        ": scales must have shape [", codes.size(0), ", ", codes.size(1), "], as codes, got ", shape_text(scales));
  const auto format = static_cast<int64_t>(Format::fp4_e2m1);
  const WeightSpec spec = weight_spec(op, codes.size(0), 32 * codes.size(1), format, 32, false);
  check_weight(op, out, spec);
  bool nan = false;
  blocks.nan = &nan;
  run(RepackArgs{.place = place, .spec = spec, .packed = {}, .out = out, .blocks = blocks});
  check(!nan, value, op, ": every scale must be finite, got 255 (nan)");
}

WeightSpec gguf_spec(GgufType type, int64_t n, int64_t k) {
  return with_gguf_type(type, [&]<class Type>() {
    return WeightSpec{.format = Type::format, .n = n, .k = k, .group_size = Type::group, .asymmetric = Type::minimums};
  });
}

void pack_gguf(const TensorView& blocks, int64_t type_, const TensorView& places, const TensorView& out) {
  constexpr std::string_view op = "pack_gguf";
  const Place place = place_of(op, {{"blocks", blocks}, {"places", places}, {"out", out}});
  check(place.device == Device{}, value, op, ": blocks must be on the CPU");  // places are read here
  const auto type_of = static_cast<GgufType>(check_number(op, "type", type_, std::size(kGgufTypeNames)));
  const auto [bytes, weights] = with_gguf_type(type_of, [&]<class Type>() {
    return std::pair<int64_t, int64_t>(Type::bytes, Type::weights);
  });
  check(blocks.dtype == DType::uint8, type, op, ": blocks must be uint8, got ", name_of(blocks.dtype));
  check(blocks.rank == 3 && blocks.size(2) == bytes && blocks.stride[2] == 1, value, op,
        ": blocks must have shape [n, k / ", weights, ", ", bytes, "] with ", bytes, " neighbouring bytes for ",
        kGgufTypeNames[type_], ", got ", shape_text(blocks));
  const WeightSpec spec = gguf_spec(type_of, blocks.size(0), weights * blocks.size(1));
  check_weight(op, out, spec);
  if (places) {
    check_tensor(op, "places", places, DType::int32, {spec.groups()});
    std::vector<bool> taken(static_cast<std::size_t>(spec.groups()));
    for (int64_t g = 0; g < spec.groups(); g++) {
      const int32_t at = places.as<const int32_t>()[g];
      check(at >= 0 && at < spec.groups() && !taken[static_cast<std::size_t>(at)], value, op,
            ": places must be the numbers 0..", spec.groups() - 1, " in another order, got ", at, " at ", g);
      taken[static_cast<std::size_t>(at)] = true;
    }
  }
  int found = 0;
  const GgufBlocks from{.type = type_of, .blocks = blocks, .places = places, .fault = &found};
  run(RepackArgs{.place = place, .spec = spec, .packed = {}, .out = out, .gguf = from});
  const auto fault = static_cast<GgufFault>(found);
  check(fault != GgufFault::scale, value, op, ": every scale must be finite, got inf or nan");
  check(fault != GgufFault::minimum, value, op, ": every minimum must be finite, got inf or nan");
  check(fault != GgufFault::range, value, op, ": the scales of a row must lie within 2^24 of its largest");
}

DequantizeArgs dequantize_args(const TensorView& weight, const WeightSpec& spec, DType dtype) {
  check_weight("dequantize", weight, spec);
  check(is_activation(dtype), type, "dequantize: the result must be float32, bfloat16 or float16, got ",
        name_of(dtype));
  return {.place = place_of("dequantize", {{"weight", weight}}), .spec = spec, .packed = weight, .out = {}};
}

DequantizeArgs embedding_args(const TensorView& weight, const TensorView& indices, const WeightSpec& spec,
                              int64_t layout_, DType dtype) {
  const Place place = place_of("embedding", {{"weight", weight}, {"indices", indices}});
  const Layout of = layout("embedding", layout_);
  const Sections shape = sections(of, spec);
  check(weight.dtype == DType::uint8, type, "embedding: weight must be packed uint8, got ", name_of(weight.dtype));
  check(weight.rank == 2 && weight.size(0) == shape.rows && weight.size(1) == shape.row_bytes, value,
        "embedding: weight must have the packed shape [", shape.rows, ", ", shape.row_bytes, "] of ",
        kFormatNames[static_cast<int>(spec.format)], " in ", kLayoutNames[static_cast<int>(of)], ", got ",
        shape_text(weight));
  check_contiguous("embedding", "weight", weight);
  check(indices.dtype == DType::int32 || indices.dtype == DType::int64, type,
        "embedding: indices must be int32 or int64, got ", name_of(indices.dtype));
  check(indices.rank < TensorView::kMaxRank, value, "embedding: indices must have fewer than ", TensorView::kMaxRank,
        " dimensions, got ", shape_text(indices));
  check(is_activation(dtype), type, "embedding: the result must be float32, bfloat16 or float16, got ", name_of(dtype));
  return {.place = place, .spec = spec, .packed = weight, .out = {}, .indices = indices, .layout = of,
          .sections = shape};
}

void embedding(DequantizeArgs args) {
  if (args.indices.numel() == 0) return;
  int64_t outside = -1;
  args.outside = &outside;
  run(args);
  check(outside < 0, index, "embedding: indices must be 0..", args.spec.n - 1, ", got another one at index ", outside,
        " of ", shape_text(args.indices));
}

bool all_finite(const TensorView& tensor) {
  check_activation("all_finite", "tensor", tensor);
  check_contiguous("all_finite", "tensor", tensor);
  bool result = true;
  const Place place = place_of("all_finite", {{"tensor", tensor}});
  if (tensor.numel()) run(AllFiniteArgs{.place = place, .tensor = tensor, .result = &result});
  return result;
}

Call describe(const QuantizeArgs& args) {
  return Call{.read = bytes_of(args.weight) + bytes_of(args.importance), .written = bytes_of(args.packed)}
      .with(args.weight, args.packed);
}

Call describe(const RepackArgs& args) {
  const TensorView& from = args.gguf ? args.gguf.blocks : args.blocks ? args.blocks.codes : args.packed;
  return Call{.read = bytes_of(from) + bytes_of(args.blocks.scales), .written = bytes_of(args.out)}.with(from, args.out);
}

Call describe(const DequantizeArgs& args) {
  const int64_t rows = args.indices ? args.indices.numel() : args.spec.n;  // rows of the weight; each is read once
  return Call{.read = bytes_of(args.packed) * rows / args.spec.n + bytes_of(args.indices),
              .written = bytes_of(args.out)}
      .with(args.packed, args.out, args.indices);
}

Call describe(const AllFiniteArgs& args) {
  return Call{.read = bytes_of(args.tensor)}.with(args.tensor);
}

}  // namespace lowbit
