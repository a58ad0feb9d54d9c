// SPDX-License-Identifier: Apache-2.0
// linear by oneDNN, of a decoded weight (cuda/linear/make_decoded_call.hpp), where a oneDNN for Level Zero is there.
#include "cuda/linear/make_decoded_call.hpp"
#include "level_zero/backend.hpp"
#include "level_zero/onednn/product.hpp"
#include "level_zero/runtime/program.hpp"

namespace lowbit::level_zero {
namespace {

using cuda::DecodedCall;
using cuda::DecodedParts;

// What oneDNN wants besides, for the largest of its products.
int64_t room_bytes(const LinearArgs& args, const DecodedParts& parts) {
  int64_t bytes = 0;
  cuda::for_each_product(args, parts, [&](const DenseProduct& product) {
    bytes = larger(bytes, product_for(args.place.device, product)->room_bytes());
  });
  return bytes;
}

void run_decoded(const LinearArgs& args) {
  const DecodedParts parts(args);
  const Workspace memory("linear", args.place, parts.library + room_bytes(args, parts));
  DecodedCall part = cuda::decoded_call(args, parts, memory.at(0));
  const bool codes = cuda::has_codes(args);
  const Format format = args.weight_spec.format;
  const Program& kernels = program(args.place, "linear_decoded");
  const auto launch = [&](const std::string& kernel, int64_t groups) {
    kernels.launch(args.place, kernel.c_str(), groups, cuda::kLinearThreads, &part, sizeof part);
  };
  if (codes) launch("code_rows_int8", args.m);
  cuda::walk(args, parts, part,
             [&] {
               const std::string_view name = kFormatNames[static_cast<int>(integers_as_int8(format))];
               launch(codes ? "decode_codes" : concat("decode_", name), cuda::ctas_that_decode(part));
             },
             [&] {
               const DenseProduct product = cuda::product_of(args, part);
               wait(args.place.device);  // oneDNN's list is not ours
               product_for(args.place.device, product)->run(product, memory.at(parts.library));
               launch(codes ? "finish_codes" : is_float(format) ? "finish_floats" : "finish_coded",
                      cuda::ctas_that_finish(part));
             });
}

// What oneDNN says of the products. The text lives until this thread asks again.
std::string_view refuses_products(const LinearArgs& args) {
  thread_local std::string reason;
  reason.clear();
  try {
    cuda::for_each_product(args, DecodedParts(args), [&](const DenseProduct& product) {
      if (reason.empty()) reason = product_for(args.place.device, product)->reason();
    });
  } catch (const std::exception& error) {  // a listing of all rows goes on with the reasons of the others
    reason = error.what();
  }
  return reason;
}

std::string_view refuses_floats(const LinearArgs& args) {
  const std::string_view reason = cuda::refuses_decoded(args);
  return reason.empty() ? refuses_products(args) : reason;
}

std::string_view refuses_codes(const LinearArgs& args) {
  const std::string_view reason = cuda::refuses_decoded_codes(args);
  return reason.empty() ? refuses_products(args) : reason;
}

constexpr Kernel<LinearArgs> kRows[] = {{"linear_codes_onednn_level_zero", refuses_codes, run_decoded},
                                        {"linear_decoded_onednn_level_zero", refuses_floats, run_decoded}};

}  // namespace

void add_linear_rows_of_onednn(Backend& backend) { add_rows(backend, kRows, std::size(kRows)); }

}  // namespace lowbit::level_zero
