// SPDX-License-Identifier: Apache-2.0
// Rows of the op dequantize, for a whole weight and for some of its rows, with the kernel of csrc/gpu.
#include "formats/list.hpp"
#include "gpu/quantize/make_dequantize_call.hpp"
#include "gpu/refuses_format.hpp"
#include "level_zero/backend.hpp"
#include "level_zero/runtime/memory.hpp"
#include "level_zero/runtime/program.hpp"

namespace lowbit::level_zero {
namespace {

void launch(const DequantizeArgs& args, int64_t rows, int64_t* outside) {
  const WeightSpec& spec = args.spec;
  const gpu::DequantizeCall call = gpu::dequantize_call(args, outside);
  const std::string kernel = concat("dequantize_", kFormatNames[static_cast<int>(integers_as_int8(spec.format))]);
  program(args.place, args.layout == Layout::row_major ? "embedding" : "dequantize")
      .launch(args.place, kernel.c_str(), rows * ceil_div(spec.k, gpu::kStretch), gpu::kDequantizeThreads, &call,
              sizeof call);
}

void run_all(const DequantizeArgs& args) { launch(args, args.spec.n, nullptr); }

void run_some(const DequantizeArgs& args) {
  const Workspace workspace("embedding", args.place, sizeof(int64_t));
  auto* const outside = static_cast<int64_t*>(workspace.at(0));
  copy(args.place.device, outside, args.outside, sizeof *outside);
  launch(args, args.indices.numel(), outside);
  copy(args.place.device, args.outside, outside, sizeof *outside);
}

std::string_view takes_all(const DequantizeArgs& args) {
  return args.indices ? "some rows are wanted" : gpu::refuses_format(args.spec.format);
}
std::string_view takes_some(const DequantizeArgs& args) {
  return args.indices ? gpu::refuses_format(args.spec.format) : "all of the weight is wanted";
}

constexpr Kernel<DequantizeArgs> kRows[] = {{"dequantize_panels_level_zero", takes_all, run_all},
                                            {"dequantize_rows_level_zero", takes_some, run_some}};

}  // namespace

void add_quantize_rows(Backend& backend) { add_rows(backend, kRows, std::size(kRows)); }

}  // namespace lowbit::level_zero
