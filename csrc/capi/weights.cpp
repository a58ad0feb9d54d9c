// SPDX-License-Identifier: Apache-2.0
// C functions of packed weights: quantize, dequantize, repack, embedding, linear.
#include <algorithm>
#include <iterator>
#include <string>

#include "capi/call.hpp"
#include "core/error.hpp"
#include "ops/checks.hpp"
#include "ops/linear.hpp"
#include "ops/quantize.hpp"

namespace lowbit::capi {

using enum ErrorKind;

extern "C" {

int lowbit_find_format(const char* name, int32_t* format) {
  return status_of([&] {
    check(name && format, value, "find_format: name and format must be given, got NULL");
    const auto* const found = std::find(std::begin(kFormatNames), std::end(kFormatNames), name);
    if (found == std::end(kFormatNames)) {
      std::string names;
      for (const std::string_view known : kFormatNames) (names += names.empty() ? "" : ", ") += known;
      check(false, value, "find_format: name must be one of ", names, ", got '", name, "'");
    }
    *format = static_cast<int32_t>(found - std::begin(kFormatNames));
  });
}

int lowbit_packed_bytes(const lowbit_packed_weight* weight, int64_t* bytes) {
  return status_of([&] {
    check(bytes, value, "packed_bytes: bytes must be given, got NULL");
    *bytes = described_weight("packed_bytes", "weight", weight).packed.numel();
  });
}

int lowbit_quantize(const lowbit_tensor* weight, const lowbit_packed_weight* packed,
                    const lowbit_quantize_options* given) {
  return status_of([&] {
    const TensorView from = tensor("quantize", "weight", weight);
    const PackedWeight to = kernel_weight("quantize", "packed", packed);
    const auto chosen = options("quantize", given);
    quantize(from, to.packed, to.spec, chosen.mapping, chosen.scale_choice,
             optional("quantize", "importance", chosen.importance));
  });
}

int lowbit_dequantize(const lowbit_packed_weight* weight, const lowbit_tensor* out) {
  return status_of([&] {
    const PackedWeight from = kernel_weight("dequantize", "weight", weight);
    DequantizeArgs args = dequantize_args(from.packed, from.spec, DType::float32);
    args.out = tensor("dequantize", "out", out);
    check_tensor("dequantize", "out", args.out, DType::float32, {from.spec.n, from.spec.k});
    run(args);
  });
}

int lowbit_repack(const lowbit_packed_weight* from, const lowbit_packed_weight* to) {
  return status_of([&] {
    const PackedWeight weight = packed_weight("repack", "from", from), other = packed_weight("repack", "to", to);
    const WeightSpec &a = weight.spec, &b = other.spec;
    check(a.format == b.format && a.n == b.n && a.k == b.k && a.group_size == b.group_size &&
              a.asymmetric == b.asymmetric,
          value, "repack: to must have the format, n, k, group_size and asymmetric of from");
    repack({.spec = a, .layout = weight.layout, .out_layout = other.layout, .packed = weight.packed,
            .out = other.packed});
  });
}

int lowbit_embedding(const lowbit_packed_weight* weight, const lowbit_tensor* indices, const lowbit_tensor* out) {
  return status_of([&] {
    const PackedWeight from = packed_weight("embedding", "weight", weight);
    const TensorView which = tensor("embedding", "indices", indices), to = tensor("embedding", "out", out);
    check_contiguous("embedding", "indices", which);
    DequantizeArgs args =
        embedding_args(from.packed, which, from.spec, static_cast<int64_t>(from.layout), to.dtype);
    auto shape = which.shape;
    shape[which.rank] = from.spec.k;
    check_shape("embedding", "out", to, {shape.data(), static_cast<std::size_t>(which.rank) + 1});
    check_contiguous("embedding", "out", to);
    args.out = to;
    embedding(args);
  });
}

int lowbit_linear(const lowbit_tensor* x, const lowbit_packed_weight* weight, const lowbit_tensor* y,
                  const lowbit_linear_options* given) {
  return status_of([&] {
    const PackedWeight packed = kernel_weight("linear", "weight", weight);
    const auto chosen = options("linear", given);
    const LinearTensors tensors{.x = tensor("linear", "x", x),
                                .weight = packed.packed,
                                .bias = optional("linear", "bias", chosen.bias),
                                .mul = optional("linear", "mul", chosen.mul),
                                .add = optional("linear", "add", chosen.add),
                                .y = tensor("linear", "y", y)};
    const LinearArgs args = linear_args(tensors, packed.spec, chosen.x_format, chosen.activation);
    auto shape = tensors.x.shape;
    shape[tensors.x.rank - 1] = packed.spec.n;
    check_shape("linear", "y", tensors.y, {shape.data(), static_cast<std::size_t>(tensors.x.rank)});
    if (args.m > 0) run(args);
  });
}

}  // extern "C"
}  // namespace lowbit::capi
