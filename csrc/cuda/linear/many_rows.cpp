// SPDX-License-Identifier: Apache-2.0
// linear of many rows: the weight is decoded to the 16 bits of the activations, or to int8, and multiplied by cuBLAS,
// some columns and some rows at a time, so that memory stays bounded and what was decoded stays in the cache. Where it
// is decoded to 16 bits a weight is rounded once to their significant bits; codes with one scale a column are exact.
#include "cuda/backend.hpp"
#include "cuda/cublas/matmul.hpp"
#include "cuda/linear/call.hpp"
#include "cuda/sources.hpp"
#include "ops/linear.hpp"

namespace lowbit::cuda {
namespace {

// By count, in bytes moved for a weight of int4: 0.5 for each 32 rows where tiles are decoded as they are multiplied;
// here 0.5 + 2 written + 2 read, and the product. They meet at 256 to 400 rows. Not measured on a GPU yet.
constexpr int64_t kFewestRows = 256;
constexpr int64_t kMostDecoded = int64_t{64} << 20, kMostProducts = int64_t{128} << 20;  // bytes

bool has_codes(const LinearArgs& args) { return !stays_float(args.x_format); }

// How a call is cut, and the memory that it takes.
struct Parts {
  int64_t padded_k, element, columns, rows;  // element: bytes of a decoded weight
  int64_t decoded, codes, scales, products;  // bytes of memory, multiples of 256

  explicit Parts(const LinearArgs& args) {
    const WeightSpec& spec = args.weight_spec;
    padded_k = has_codes(args) ? round_up(spec.k, 16) : spec.k;
    element = has_codes(args) ? 1 : 2;
    const int64_t fitting = kMostDecoded / (element * padded_k) / kPanelColumns * kPanelColumns;
    columns = std::min(spec.n, std::max<int64_t>(fitting, 4 * kPanelColumns));
    rows = std::min(args.m, std::max<int64_t>(kMostProducts / (4 * columns), 1));
    decoded = round_up(element * columns * padded_k, 256);
    codes = has_codes(args) ? round_up(args.m * padded_k, 256) : 0;
    scales = has_codes(args) ? round_up(4 * args.m, 256) : 0;
    products = round_up(4 * columns * rows, 256);
  }
};

Matmul matmul_of(const LinearArgs& args, const DecodedCall& part) {
  Matmul matmul{.m = part.rows, .n = part.columns, .k = part.padded_k, .dtype = args.dtype,
                .x = static_cast<const char*>(args.x) + 2 * part.first_row * part.padded_k, .w = part.decoded,
                .y = part.products};
  if (has_codes(args)) matmul.dtype = DType::int8, matmul.x = part.codes + part.first_row * part.padded_k;
  return matmul;
}

template <class Decode, class Multiply>
void walk(const LinearArgs& args, const Parts& parts, DecodedCall& part, Decode&& decode, Multiply&& multiply) {
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

LinearCall call_of(const LinearArgs& args) {
  return {.spec = args.weight_spec, .sections = PanelLayout::sections(args.weight_spec), .weight = args.weight,
          .x = args.x, .m = args.m, .tiles = 0, .groups = 0, .group_shift = 0, .dtype = args.dtype,
          .bias_dtype = args.bias_dtype, .x_format = args.x_format, .activation = args.activation, .bias = args.bias,
          .mul = args.mul, .add = args.add, .y = args.y, .ordered = nullptr, .sums = nullptr, .row_scale = nullptr,
          .row_offset = nullptr};
}

void run_decoded(const LinearArgs& args) {
  const Parts parts(args);
  const int64_t before_scales = parts.decoded + parts.codes, before_products = before_scales + 2 * parts.scales,
                before_workspace = before_products + parts.products;
  const Workspace memory("linear", args.place, before_workspace + kMatmulWorkspace);
  DecodedCall part{.call = call_of(args), .first_column = 0, .columns = 0, .first_row = 0, .rows = 0,
                   .padded_k = parts.padded_k, .decoded = memory.at(0),
                   .codes = static_cast<int8_t*>(memory.at(parts.decoded)), .products = memory.at(before_products)};
  part.call.row_scale = static_cast<float*>(memory.at(before_scales));
  part.call.row_offset = static_cast<float*>(memory.at(before_scales + parts.scales));
  const Format format = args.weight_spec.format;
  const Program& kernels = program(
      args.place, {static_cast<int64_t>(SourceKind::decoded), static_cast<int64_t>(format), has_codes(args)},
      [&] { return decoded_source(format, has_codes(args)); });
  const auto launch = [&](const char* kernel, int64_t ctas) {
    kernels.launch(args.place, kernel, ctas, kLinearThreads, &part);
  };
  if (has_codes(args)) launch("code_rows", args.m);
  walk(args, parts, part,
       [&] {
         launch("decode_columns", ceil_div(part.columns, kPanelColumns) * ceil_div(part.padded_k, kDecodedStretch));
       },
       [&] {
         run(args.place, matmul_of(args, part), memory.at(before_workspace));
         launch("finish_products", ceil_div(part.rows * part.columns, kFinishedByCta));
       });
}

// A dense weight keeps its bits in activations of its own dtype alone.
bool keeps_weight(Format format, DType dtype) {
  switch (format) {
    case Format::float32: return false;
    case Format::bfloat16: return dtype == DType::bfloat16;
    case Format::float16: return dtype == DType::float16;
    default: return true;
  }
}

std::string_view refuses_product(const LinearArgs& args) {
  if (args.m < kFewestRows) return "fewer than 256 rows";
  DecodedCall part{};  // its memory will be at multiples of 256 bytes, as null is
  part.padded_k = Parts(args).padded_k;
  std::string_view reason;
  walk(args, Parts(args), part, [] {}, [&] {
    if (reason.empty()) reason = algorithm_for(args.place, matmul_of(args, part)).refused;
  });
  return reason;
}

std::string_view refuses_floats(const LinearArgs& args) {
  if (args.x_format != XFormat::floating) return "activations that are rounded to codes";
  if (args.dtype == DType::float32) return "float32: the products of its parts are faster";
  if (!keeps_weight(args.weight_spec.format, args.dtype)) return "a dense weight of another dtype";
  return refuses_product(args);
}

std::string_view refuses_codes(const LinearArgs& args) {
  const WeightSpec& spec = args.weight_spec;
  if (stays_float(args.x_format)) return "float activations";
  if (args.x_format == XFormat::int8_group && spec.group_size) return "a scale for each group of activations";
  if (spec.group_size || spec.asymmetric) return "a weight with groups or zero points";
  if (spec.k > kMostCodesK) return "k above 131072: an int32 cannot hold the sum";
  return refuses_product(args);
}

constexpr Kernel<LinearArgs> kRows[] = {{"linear_codes_cublas", refuses_codes, run_decoded},
                                        {"linear_decoded_cublas", refuses_floats, run_decoded}};

}  // namespace

void add_linear_rows_of_many(Backend& backend) { add_rows(backend, kRows, std::size(kRows)); }

}  // namespace lowbit::cuda
