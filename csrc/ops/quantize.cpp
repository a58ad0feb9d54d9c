// SPDX-License-Identifier: Apache-2.0
#include "ops/quantize.hpp"

#include "ops/linear.hpp"
#include "ops/place.hpp"

namespace lowbit {

using enum ErrorKind;

namespace {

void check_matrix(std::string_view op, std::string_view name, const TensorView& tensor, DType dtype, int64_t rows,
                  int64_t columns) {
  check(tensor.dtype == dtype, type, op, ": ", name, " must be ", name_of(dtype), ", got ", name_of(tensor.dtype));
  check(tensor.rank == 2 && tensor.size(0) == rows && tensor.size(1) == columns, value, op, ": ", name,
        " must have shape [", rows, ", ", columns, "], got ", shape_text(tensor));
  check(tensor.is_contiguous(), value, op, ": ", name, " must be contiguous");
}

}  // namespace

Distortion quantize(const TensorView& weight, const TensorView& packed, const WeightSpec& spec, int64_t mapping,
                    int64_t scale, const TensorView& importance) {
  const Place place = place_of("quantize", {{"weight", weight}, {"packed", packed}, {"importance", importance}});
  check(is_activation(weight.dtype), type, "quantize: weight must be float32, bfloat16 or float16, got ",
        name_of(weight.dtype));
  check_matrix("quantize", "weight", weight, weight.dtype, spec.n, spec.k);
  check_weight("quantize", packed, spec);
  check(mapping >= 0 && mapping < static_cast<int64_t>(std::size(kMappingNames)), value,
        "quantize: mapping must be 0..", std::size(kMappingNames) - 1, ", got mapping=", mapping);
  check(is_float(spec.format) || (static_cast<Mapping>(mapping) == Mapping::asymmetric) == spec.asymmetric, value,
        "quantize: mapping ", kMappingNames[mapping], " does not go with asymmetric=", spec.asymmetric);
  check(scale >= 0 && scale < static_cast<int64_t>(std::size(kScaleChoiceNames)), value, "quantize: scale must be 0..",
        std::size(kScaleChoiceNames) - 1, ", got scale=", scale);
  const ScaleChoice choice = static_cast<ScaleChoice>(scale);
  check(choice == ScaleChoice::absmax || !is_float(spec.format), value, "quantize: a ",
        kFormatNames[static_cast<int>(spec.format)], " weight has no scales to search for");
  check(choice == ScaleChoice::absmax || static_cast<Mapping>(mapping) != Mapping::symmetric_no_clipping_err, value,
        "quantize: mapping symmetric_no_clipping_err needs scale absmax: a searched scale may clip");
  if (importance) {
    check(choice == ScaleChoice::search, value, "quantize: importance needs scale search, got absmax");
    check(importance.dtype == DType::float32, type, "quantize: importance must be float32, got ",
          name_of(importance.dtype));
    check(importance.rank == 1 && importance.size(0) == spec.k, value, "quantize: importance must have shape [", spec.k,
          "], got ", shape_text(importance));
    check(importance.is_contiguous(), value, "quantize: importance must be contiguous");
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
  check(number >= 0 && number < static_cast<int64_t>(std::size(kLayoutNames)), value, op, ": layout must be 0..",
        std::size(kLayoutNames) - 1, ", got layout=", number);
  return static_cast<Layout>(number);
}

Sections sections(Layout layout, const WeightSpec& spec) {
  return with_layout(layout, [&]<class Type>() { return Type::sections(spec); });
}

void repack(RepackArgs args) {
  args.place = place_of("repack", {{"packed", args.packed}, {"out", args.out}});
  args.from = sections(args.layout, args.spec), args.to = sections(args.out_layout, args.spec);
  check_matrix("repack", "packed", args.packed, DType::uint8, args.from.rows, args.from.row_bytes);
  check_matrix("repack", "out", args.out, DType::uint8, args.to.rows, args.to.row_bytes);
  run(args);
}

void dequantize(const TensorView& packed, const WeightSpec& spec, const TensorView& out) {
  const Place place = place_of("dequantize", {{"packed", packed}, {"out", out}});
  check_weight("dequantize", packed, spec);
  check_matrix("dequantize", "out", out, DType::float32, spec.n, spec.k);
  run(DequantizeArgs{.place = place, .spec = spec, .packed = packed, .out = out});
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
  check(weight.is_contiguous(), value, "embedding: weight must be contiguous");
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
  check(outside < 0, index, "embedding: indices must be 0..", args.spec.n - 1, ", got another one at place ", outside,
        " of ", shape_text(args.indices));
}

bool all_finite(const TensorView& tensor) {
  check(is_activation(tensor.dtype), type, "all_finite: tensor must be float32, bfloat16 or float16, got ",
        name_of(tensor.dtype));
  check(tensor.is_contiguous(), value, "all_finite: tensor must be contiguous");
  bool result = true;
  const Place place = place_of("all_finite", {{"tensor", tensor}});
  if (tensor.numel()) run(AllFiniteArgs{.place = place, .tensor = tensor, .result = &result});
  return result;
}

Call describe(const QuantizeArgs& args) {
  Call call{.read = bytes_of(args.weight) + bytes_of(args.importance), .written = bytes_of(args.packed)};
  call.add(args.weight), call.add(args.packed);
  return call;
}

Call describe(const RepackArgs& args) {
  Call call{.read = bytes_of(args.packed), .written = bytes_of(args.out)};
  call.add(args.packed), call.add(args.out);
  return call;
}

Call describe(const DequantizeArgs& args) {
  const int64_t rows = args.indices ? args.indices.numel() : args.spec.n;  // of the weight; each read once
  Call call{.read = bytes_of(args.packed) * rows / args.spec.n + bytes_of(args.indices), .written = bytes_of(args.out)};
  call.add(args.packed), call.add(args.out), call.add(args.indices);
  return call;
}

Call describe(const AllFiniteArgs& args) {
  Call call{.read = bytes_of(args.tensor)};
  call.add(args.tensor);
  return call;
}

}  // namespace lowbit
