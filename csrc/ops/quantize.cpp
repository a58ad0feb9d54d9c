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

template <class Args>  // PackArgs or UnpackArgs
void check_plain_codes(std::string_view op, Args& args) {
  args.place =
      place_of(op, {{"packed", args.packed}, {"codes", args.codes}, {"scale", args.scale}, {"zero", args.zero}});
  const WeightSpec& spec = args.spec;
  check(!is_float(spec.format), value, op, ": a ", kFormatNames[static_cast<int>(spec.format)], " weight has no codes");
  check_weight(op, args.packed, spec);
  check_matrix(op, "codes", args.codes, DType::uint8, spec.n, spec.k);
  check_matrix(op, "scale", args.scale, DType::float32, spec.n, spec.groups());
  if (args.zero || spec.asymmetric) check_matrix(op, "zero", args.zero, DType::float32, spec.n, spec.groups());
}

}  // namespace

Distortion quantize(const TensorView& weight, const TensorView& packed, const WeightSpec& spec, int64_t mapping) {
  const Place place = place_of("quantize", {{"weight", weight}, {"packed", packed}});
  check(is_activation(weight.dtype), type, "quantize: weight must be float32, bfloat16 or float16, got ",
        name_of(weight.dtype));
  check_matrix("quantize", "weight", weight, weight.dtype, spec.n, spec.k);
  check_weight("quantize", packed, spec);
  check(mapping >= 0 && mapping < static_cast<int64_t>(std::size(kMappingNames)), value,
        "quantize: mapping must be 0..", std::size(kMappingNames) - 1, ", got mapping=", mapping);
  check(is_float(spec.format) || (static_cast<Mapping>(mapping) == Mapping::asymmetric) == spec.asymmetric, value,
        "quantize: mapping ", kMappingNames[mapping], " does not go with asymmetric=", spec.asymmetric);
  check(all_finite(weight), value, "quantize: weight must be finite, got inf or nan");
  Distortion distortion;
  run(QuantizeArgs{.place = place,
                   .spec = spec,
                   .mapping = static_cast<Mapping>(mapping),
                   .weight = weight,
                   .packed = packed,
                   .distortion = &distortion});
  return distortion;
}

void pack(PackArgs args) {
  check(args.spec.asymmetric || !args.zero, value, "pack: a symmetric weight has no zero point, got zero");
  check_plain_codes("pack", args);
  check(all_finite(args.scale), value, "pack: scale must be finite, got inf or nan");
  check(!args.zero || all_finite(args.zero), value, "pack: zero must be finite, got inf or nan");
  run(args);
}

void unpack(UnpackArgs args) {
  check_plain_codes("unpack", args);
  run(args);
}

void dequantize(const TensorView& packed, const WeightSpec& spec, const TensorView& out) {
  const Place place = place_of("dequantize", {{"packed", packed}, {"out", out}});
  check_weight("dequantize", packed, spec);
  check_matrix("dequantize", "out", out, DType::float32, spec.n, spec.k);
  run(DequantizeArgs{.place = place, .spec = spec, .packed = packed, .out = out});
}

void refuse_code(int code, int highest) {
  throw Error(value, concat("pack: codes must be 0..", highest, ", got ", code));
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

}  // namespace lowbit
