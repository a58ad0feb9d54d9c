// SPDX-License-Identifier: Apache-2.0
// linear of many rows: the weight is decoded to the 16 bits of the activations and multiplied by cuBLAS, some columns
// and some rows at a time, so that memory stays bounded and what was decoded stays in the cache. A weight is rounded
// once, to the significant bits of the activations; codes with one scale a column are exact.
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

struct Parts {
  int64_t columns, rows;
  explicit Parts(const LinearArgs& args) {
    const WeightSpec& spec = args.weight_spec;
    const int64_t fitting = kMostDecoded / (2 * spec.k) / kPanelColumns * kPanelColumns;
    columns = std::min(spec.n, std::max<int64_t>(fitting, 4 * kPanelColumns));
    rows = std::min(args.m, std::max<int64_t>(kMostProducts / (4 * columns), 1));
  }
};

Matmul matmul_of(const LinearArgs& args, const DecodedCall& part) {
  const int64_t k = args.weight_spec.k;
  return {.m = part.rows, .n = part.columns, .k = k, .y_stride = part.columns, .dtype = args.dtype,
          .x = static_cast<const char*>(args.x) + 2 * part.first_row * k, .w = part.decoded, .y = part.products};
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

void run_decoded(const LinearArgs& args) {
  const WeightSpec& spec = args.weight_spec;
  const Parts parts(args);
  const int64_t decoded = round_up(2 * parts.columns * spec.k, 256),
                products = round_up(4 * parts.columns * parts.rows, 256);
  const Workspace workspace("linear", args.place, decoded + products + kMatmulWorkspace);
  DecodedCall part{.call = {.spec = spec, .sections = PanelLayout::sections(spec), .weight = args.weight, .x = args.x,
                            .m = args.m, .tiles = 0, .groups = 0, .group_shift = 0, .dtype = args.dtype,
                            .bias_dtype = args.bias_dtype, .x_format = args.x_format, .activation = args.activation,
                            .bias = args.bias, .mul = args.mul, .add = args.add, .y = args.y, .ordered = nullptr,
                            .sums = nullptr, .row_scale = nullptr, .row_offset = nullptr},
                   .first_column = 0, .columns = 0, .first_row = 0, .rows = 0, .decoded = workspace.at(0),
                   .products = static_cast<float*>(workspace.at(decoded))};
  const Program& kernels = program(args.place, {static_cast<int64_t>(SourceKind::decoded),
                                                static_cast<int64_t>(spec.format)},
                                   [&] { return decoded_source(spec.format); });
  const auto decode = [&] {
    kernels.launch(args.place, "decode_columns",
                   ceil_div(part.columns, kPanelColumns) * ceil_div(spec.k, kDecodedStretch), kLinearThreads, &part);
  };
  const auto multiply = [&] {
    run(args.place, matmul_of(args, part), workspace.at(decoded + products));
    kernels.launch(args.place, "finish_products", ceil_div(part.rows * part.columns, kFinishedByCta), kLinearThreads,
                   &part);
  };
  walk(args, parts, part, decode, multiply);
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

std::string_view refuses(const LinearArgs& args) {
  if (args.x_format != XFormat::floating) return "activations that are rounded to codes";
  if (args.dtype == DType::float32) return "float32: the products of its parts are faster";
  if (!keeps_weight(args.weight_spec.format, args.dtype)) return "a dense weight of another dtype";
  if (args.m < kFewestRows) return "fewer than 256 rows";
  DecodedCall part{};  // its memory will be at multiples of 256 bytes, as null is
  std::string_view reason;
  walk(args, Parts(args), part, [] {}, [&] {
    if (reason.empty()) reason = algorithm_for(args.place, matmul_of(args, part)).refused;
  });
  return reason;
}

constexpr Kernel<LinearArgs> kRows[] = {{"linear_decoded_cublas", refuses, run_decoded}};

}  // namespace

void add_linear_rows_of_many(Backend& backend) { add_rows(backend, kRows, std::size(kRows)); }

}  // namespace lowbit::cuda
