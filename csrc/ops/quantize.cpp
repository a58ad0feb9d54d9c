// SPDX-License-Identifier: Apache-2.0
#include "ops/quantize.hpp"

#include <atomic>
#include <cmath>

#include "core/parallel.hpp"
#include "ops/linear.hpp"

namespace lowbit {

using enum ErrorKind;

namespace {

void check_matrix(std::string_view op, std::string_view name, const TensorView& tensor, DType dtype, int64_t rows, int64_t columns) {
  check(tensor.dtype == dtype, type, op, ": ", name, " must be ", name_of(dtype), ", got ", name_of(tensor.dtype));
  check(tensor.rank == 2 && tensor.size(0) == rows && tensor.size(1) == columns, value, op, ": ", name, " must have shape [", rows, ", ",
        columns, "], got ", shape_text(tensor));
  check(tensor.is_contiguous(), value, op, ": ", name, " must be contiguous");
}

// codes, scale and zero of pack and unpack.
QuantizeArgs plain_codes(std::string_view op, Direction direction, const TensorView& packed, const WeightSpec& spec,
                         const TensorView& codes, const TensorView& scale, const TensorView& zero) {
  check(!is_float(spec.format), value, op, ": a ", kFormatNames[static_cast<int>(spec.format)], " weight has no codes");
  check_weight(op, packed, spec);
  check_matrix(op, "codes", codes, DType::uint8, spec.n, spec.k);
  check_matrix(op, "scale", scale, DType::float32, spec.n, spec.groups());
  if (zero || spec.asymmetric) check_matrix(op, "zero", zero, DType::float32, spec.n, spec.groups());
  return {.direction = direction, .spec = spec, .packed = packed.as<uint8_t>(), .codes = codes.as<uint8_t>(),
          .scale = scale.as<float>(), .zero = zero.as<float>()};
}

}  // namespace

Distortion quantize(const TensorView& weight, const TensorView& packed, const WeightSpec& spec, int64_t mapping) {
  check(is_activation(weight.dtype), type, "quantize: weight must be float32, bfloat16 or float16, got ", name_of(weight.dtype));
  check_matrix("quantize", "weight", weight, weight.dtype, spec.n, spec.k);
  check_weight("quantize", packed, spec);
  check(mapping >= 0 && mapping < static_cast<int64_t>(std::size(kMappingNames)), value, "quantize: mapping must be 0..",
        std::size(kMappingNames) - 1, ", got mapping=", mapping);
  check(is_float(spec.format) || (static_cast<Mapping>(mapping) == Mapping::asymmetric) == spec.asymmetric, value, "quantize: mapping ",
        kMappingNames[mapping], " does not go with asymmetric=", spec.asymmetric);
  check(all_finite(weight), value, "quantize: weight must be finite, got inf or nan");
  Distortion distortion{};
  run(QuantizeArgs{.direction = Direction::quantize, .spec = spec, .mapping = static_cast<Mapping>(mapping), .dtype = weight.dtype,
                   .weight = weight.data, .packed = packed.as<uint8_t>(), .signal = &distortion.signal, .noise = &distortion.noise});
  return distortion;
}

void pack(const TensorView& codes, const TensorView& scale, const TensorView& zero, const TensorView& packed, const WeightSpec& spec) {
  check(spec.asymmetric || !zero, value, "pack: a symmetric weight has no zero point, got zero");
  const QuantizeArgs args = plain_codes("pack", Direction::pack, packed, spec, codes, scale, zero);
  for (int64_t i = 0; i < codes.numel(); i++)
    check(args.codes[i] <= code_max(spec.format), value, "pack: codes must be 0..", code_max(spec.format), ", got ", int{args.codes[i]});
  check(all_finite(scale), value, "pack: scale must be finite, got inf or nan");
  check(!zero || all_finite(zero), value, "pack: zero must be finite, got inf or nan");
  run(args);
}

void unpack(const TensorView& packed, const WeightSpec& spec, const TensorView& codes, const TensorView& scale, const TensorView& zero) {
  run(plain_codes("unpack", Direction::unpack, packed, spec, codes, scale, zero));
}

void dequantize(const TensorView& packed, const WeightSpec& spec, const TensorView& out) {
  check_weight("dequantize", packed, spec);
  check_matrix("dequantize", "out", out, DType::float32, spec.n, spec.k);
  run(QuantizeArgs{.direction = Direction::dequantize, .spec = spec, .packed = packed.as<uint8_t>(), .dequantized = out.as<float>()});
}

bool all_finite(const TensorView& tensor) {
  check(is_activation(tensor.dtype), type, "all_finite: tensor must be float32, bfloat16 or float16, got ", name_of(tensor.dtype));
  check(tensor.is_contiguous(), value, "all_finite: tensor must be contiguous");
  constexpr int64_t kBlock = 1 << 16;
  const int64_t count = tensor.numel();
  std::atomic<bool> finite{true};
  parallel_for(ceil_div(count, kBlock), num_threads(), [&](int64_t block) {
    const int64_t begin = block * kBlock, end = std::min(count, begin + kBlock);
    uint32_t bad = 0;  // an exponent of all ones is inf or nan
    if (tensor.dtype == DType::float32) {
      for (int64_t i = begin; i < end; i++) bad |= (tensor.as<const uint32_t>()[i] & 0x7f800000u) == 0x7f800000u;
    } else {
      const uint16_t exponent = tensor.dtype == DType::bfloat16 ? 0x7f80u : 0x7c00u;
      for (int64_t i = begin; i < end; i++) bad |= (tensor.as<const uint16_t>()[i] & exponent) == exponent;
    }
    if (bad) finite = false;
  });
  return finite;
}

}  // namespace lowbit
