// SPDX-License-Identifier: Apache-2.0
// Rows of the op linear. What the op has and oneDNN has not is refused here; how oneDNN does the rest: matmul.hpp.
#include <algorithm>
#include <cstring>

#include "core/bits.hpp"
#include "core/isa.hpp"
#include "core/parallel.hpp"
#include "formats/format.hpp"
#include "onednn/backend.hpp"
#include "onednn/matmul.hpp"
#include "onednn/operands.hpp"
#include "onednn/room.hpp"

namespace lowbit::onednn {
namespace {

constexpr int64_t kMostCodesK = 1 << 17;  // an int32 holds the sum of so many products of codes, 128 * 127 at most

Weights weights_of(const LinearArgs& args) {
  switch (args.weight_spec.format) {
    case Format::float32: return Weights::float32_panels;
    case Format::bfloat16:
      return args.dtype == DType::float32 ? Weights::bfloat16_rows : Weights::bfloat16_panels;
    case Format::float16: return Weights::float16_rows;
    default: return stays_float(args.x_format) ? Weights::decoded_rows : Weights::int8_rows;
  }
}

// oneDNN wants whole groups: rows of x and of the weight end in zeros up to the last one's end.
int64_t k_of_rows(const WeightSpec& spec) { return round_up(spec.padded_k(), std::max(spec.group_size, kTileK)); }

Product product_of(const LinearArgs& args, const Threads& threads) {
  const WeightSpec& spec = args.weight_spec;
  return {.weights = weights_of(args), .m = args.m, .n = spec.n, .k = k_of_rows(spec), .group_size = spec.group_size,
          .result = args.dtype, .activation = args.activation, .bias = args.bias != nullptr,
          .mul = args.mul != nullptr, .add = args.add != nullptr, .threads = threads.count()};
}

// What stands behind the product, and what oneDNN itself says of it. The text lives until this thread asks again.
std::string_view refused_product(const LinearArgs& args) {
  if (args.activation == Activation::relu) return "relu of oneDNN makes 0 of nan";
  if (args.activation == Activation::gelu) return "gelu of oneDNN makes nan of inf";
  thread_local std::string reason;
  try {
    const Threads threads;
    reason = matmul(product_of(args, threads))->reason();
  } catch (const std::exception& error) {  // a listing of all rows goes on with the reasons of the others
    reason = error.what();
  }
  return reason;
}

template <Format kFormat, DType kDType>
std::string_view refuses_floats(const LinearArgs& args) {
  if (args.weight_spec.format != kFormat) return "another weight format";
  if (args.dtype != kDType && args.dtype != DType::float32)
    return "oneDNN multiplies a float weight by activations of its own dtype or float32";
  return refused_product(args);
}

// oneDNN goes by cpuid alone. Seen on Zen 3 with oneDNN 3.2: 5.1 instead of 7.6.
bool has_vnni() { return isa_unavailable("avx2_vnni").empty() || isa_unavailable("avx512_vnni").empty(); }

std::string_view refuses_codes(const LinearArgs& args) {
  const WeightSpec& spec = args.weight_spec;
  if (spec.format != Format::int8) return "another weight format";
  if (stays_float(args.x_format)) return "float activations";
  if (spec.group_size) return "oneDNN has no scales of groups for a product of codes";
  if (spec.asymmetric || args.x_format == XFormat::int8_row_asymmetric) return "asymmetric codes";
  if (spec.k > kMostCodesK) return "k above 131072: an int32 cannot hold the sum";
  if (!has_vnni()) return "oneDNN adds products of int8 in 16 bits on a processor without VNNI: sums saturate";
  return refused_product(args);
}

template <Format kFormat>
std::string_view refuses_decoded(const LinearArgs& args) {
  const WeightSpec& spec = args.weight_spec;
  if (spec.format != kFormat) return "another weight format";
  if (!stays_float(args.x_format)) return "activations as codes";
  if (spec.asymmetric) return "zero points are float16 here, and integers in oneDNN";
  if (spec.group_size && args.dtype != DType::float32)
    return "oneDNN rounds a weight of groups to 16 bits before it multiplies 16-bit activations";
  return refused_product(args);
}

int64_t row_bytes(const LinearArgs& args, int64_t k) { return k * static_cast<int64_t>(size_of(args.dtype)); }

// Rows of x with zeros behind them: a weight's padding, multiplied by what lies behind a row of x, may
// give nan.
void pad_rows(const LinearArgs& args, char* to) {
  const int64_t k = k_of_rows(args.weight_spec);
  const int64_t from_row = row_bytes(args, args.weight_spec.k), to_row = row_bytes(args, k);
  parallel_for(args.m, threads_for(args.m * k), [&](int64_t row) {
    std::memcpy(to + row * to_row, static_cast<const char*>(args.x) + row * from_row,
                static_cast<std::size_t>(from_row));
    std::memset(to + row * to_row + from_row, 0, static_cast<std::size_t>(to_row - from_row));
  });
}

const float* float_bias(const LinearArgs& args, float* room_for_it) {
  if (!args.bias || args.bias_dtype == DType::float32) return static_cast<const float*>(args.bias);
  widen(static_cast<const char*>(args.bias), args.bias_dtype, args.weight_spec.n, args.weight_spec.n, room_for_it);
  return room_for_it;
}

void run_floats(const LinearArgs& args) {
  const Threads threads;
  const auto product = matmul(product_of(args, threads));
  const WeightSpec& spec = args.weight_spec;
  const int64_t k = k_of_rows(spec), groups = spec.group_size ? k / spec.group_size : 1;
  const Weights weights = weights_of(args);
  const bool padded = spec.k != k, coded = weights == Weights::decoded_rows,
             in_place = weights == Weights::float32_panels || weights == Weights::bfloat16_panels;
  struct Call {
    char *library, *x, *weight;
    float *scale, *bias;
  };
  const Call call = in_room<Call>([&](Parts& parts) {
    return Call{parts.take<char>(product->room_bytes()), parts.take<char>(padded ? args.m * row_bytes(args, k) : 0),
                parts.take<char>(in_place ? 0 : spec.panels() * kPanelColumns * k * (coded ? 1 : 2)),
                parts.take<float>(coded ? groups * spec.n : 0), parts.take<float>(spec.n)};
  });
  if (padded) pad_rows(args, call.x);
  if (coded) {
    rows_of_panels(spec, args.weight, k, reinterpret_cast<int8_t*>(call.weight));
    scales_of_panels(spec, args.weight, groups, call.scale);
  } else if (!in_place) {
    rows_of_k(spec, args.weight, reinterpret_cast<uint16_t*>(call.weight));
  }
  product->run({.x = padded ? call.x : args.x,
                .weight = in_place ? static_cast<const void*>(args.weight) : call.weight, .row_scale = nullptr,
                .column_scale = call.scale, .bias = float_bias(args, call.bias), .mul = args.mul, .add = args.add,
                .y = args.y},
               call.library);
}

void run_codes(const LinearArgs& args) {
  const Threads threads;
  const auto product = matmul(product_of(args, threads));
  const WeightSpec& spec = args.weight_spec;
  struct Call {
    char* library;
    int8_t *x, *weight;
    float *row_scale, *column_scale, *bias;
  };
  const int64_t stored_n = spec.panels() * kPanelColumns;
  const Call call = in_room<Call>([&](Parts& parts) {
    return Call{parts.take<char>(product->room_bytes()), parts.take<int8_t>(args.m * spec.padded_k()),
                parts.take<int8_t>(stored_n * spec.padded_k()), parts.take<float>(args.m),
                parts.take<float>(spec.n), parts.take<float>(spec.n)};
  });
  quantize_rows(args, call.x, call.row_scale);
  rows_of_panels(spec, args.weight, spec.padded_k(), call.weight);
  scales_of_panels(spec, args.weight, 1, call.column_scale);
  product->run({.x = call.x, .weight = call.weight, .row_scale = call.row_scale, .column_scale = call.column_scale,
                .bias = float_bias(args, call.bias), .mul = args.mul, .add = args.add, .y = args.y},
               call.library);
}

constexpr Kernel<LinearArgs> kRows[] = {
    {"linear_int8_int8_onednn", refuses_codes, run_codes},
    {"linear_float32_onednn", refuses_floats<Format::float32, DType::float32>, run_floats},
    {"linear_bfloat16_onednn", refuses_floats<Format::bfloat16, DType::bfloat16>, run_floats},
    {"linear_float16_onednn", refuses_floats<Format::float16, DType::float16>, run_floats},
    {"linear_int8_onednn", refuses_decoded<Format::int8>, run_floats},
    {"linear_int4_onednn", refuses_decoded<Format::int4>, run_floats}};

}  // namespace

void add_linear_rows(Backend& backend) { add_rows(backend, kRows, std::size(kRows)); }

}  // namespace lowbit::onednn
