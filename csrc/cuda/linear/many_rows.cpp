// SPDX-License-Identifier: Apache-2.0
// linear for many rows by cuBLAS, with a decoded weight (make_decoded_call.hpp).
#include "cuda/backend.hpp"
#include "cuda/cublas/matmul.hpp"
#include "cuda/linear/make_decoded_call.hpp"
#include "cuda/sources.hpp"

namespace lowbit::cuda {
namespace {

// int4 at 8192 x 8192 on an H200: products that decode on the fly take 28 us per 32 rows. Decoding once takes 54 us,
// and the product of 128 rows 37. Codes take 79 us to decode, and a product of 32 rows 17.
constexpr int64_t kMinRows = 128, kMinRowsOfCodes = 256;

void run_decoded(const LinearArgs& args) {
  const DecodedParts parts(args);
  const Workspace memory("linear", args.place, parts.library + kMatmulWorkspace);
  DecodedCall part = decoded_call(args, parts, memory.at(0));
  const Format format = args.weight_spec.format;
  const Program& kernels = program(
      args.place, {static_cast<int64_t>(SourceKind::decoded), static_cast<int64_t>(format), has_codes(args)},
      [&] { return decoded_source(format, has_codes(args)); });
  const auto launch = [&](const char* kernel, int64_t ctas) {
    kernels.launch(args.place, kernel, ctas, kLinearThreads, &part);
  };
  if (has_codes(args)) launch("code_rows", args.m);
  walk(args, parts, part, [&] { launch("decode_columns", ctas_that_decode(part)); },
       [&] {
         run(args.place, product_of(args, part), memory.at(parts.library));
         if (!part.is_whole) launch("finish_products", ctas_that_finish(part));
       });
}

std::string_view refuses_product(const LinearArgs& args) {
  if (args.m < (has_codes(args) ? kMinRowsOfCodes : kMinRows))
    return has_codes(args) ? "fewer than 256 rows" : "fewer than 128 rows";
  std::string_view reason;
  for_each_product(args, DecodedParts(args), [&](const DenseProduct& product) {
    if (reason.empty()) reason = algorithm_for(args.place, product).refused;
  });
  return reason;
}

std::string_view refuses_floats(const LinearArgs& args) {
  if (args.dtype == DType::float32 && args.x_format == XFormat::floating)
    return "float32: the products of its parts are faster";
  const std::string_view reason = refuses_decoded(args);
  return reason.empty() ? refuses_product(args) : reason;
}

std::string_view refuses_codes(const LinearArgs& args) {
  const std::string_view reason = refuses_decoded_codes(args);
  return reason.empty() ? refuses_product(args) : reason;
}

constexpr Kernel<LinearArgs> kRows[] = {{"linear_codes_cublas", refuses_codes, run_decoded},
                                        {"linear_decoded_cublas", refuses_floats, run_decoded}};

}  // namespace

void add_linear_rows_of_many(Backend& backend) { add_rows(backend, kRows, std::size(kRows)); }

}  // namespace lowbit::cuda
