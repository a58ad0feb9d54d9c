// SPDX-License-Identifier: Apache-2.0
// The row of the op dequantize for all of a weight, by the kernel of CUDA.
#include "cuda/quantize/call.hpp"
#include "formats/list.hpp"
#include "level_zero/backend.hpp"
#include "level_zero/runtime/program.hpp"
#include "ops/quantize.hpp"

namespace lowbit::level_zero {
namespace {

void run_dequantize(const DequantizeArgs& args) {
  const WeightSpec& spec = args.spec;
  const cuda::DequantizeCall call{spec, PanelLayout::sections(spec), args.packed.as<const uint8_t>(),
                                  args.out.as<float>()};
  const std::string kernel = concat("dequantize_", kFormatNames[static_cast<int>(spec.format)]);
  program(args.place, "dequantize")
      .launch(args.place, kernel.c_str(), spec.n * ceil_div(spec.k, cuda::kStretch), cuda::kDequantizeThreads, &call,
              sizeof call);
}

std::string_view refuses(const DequantizeArgs& args) { return args.indices ? "some rows are wanted" : ""; }

constexpr Kernel<DequantizeArgs> kRows[] = {{"dequantize_panels_level_zero", refuses, run_dequantize}};

}  // namespace

void add_quantize_rows(Backend& backend) { add_rows(backend, kRows, std::size(kRows)); }

}  // namespace lowbit::level_zero
