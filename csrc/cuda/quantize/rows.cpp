// SPDX-License-Identifier: Apache-2.0
// The row of the op dequantize for all of a weight.
#include "cuda/backend.hpp"
#include "cuda/quantize/call.hpp"
#include "cuda/sources.hpp"
#include "ops/quantize.hpp"

namespace lowbit::cuda {
namespace {

void run_dequantize(const DequantizeArgs& args) {
  const WeightSpec& spec = args.spec;
  const DequantizeCall call{spec, PanelLayout::sections(spec), args.packed.as<const uint8_t>(), args.out.as<float>()};
  program(args.place, {static_cast<int64_t>(SourceKind::dequantize), static_cast<int64_t>(spec.format)},
          [&] { return dequantize_source(spec.format); })
      .launch(args.place, "dequantize", spec.n * ceil_div(spec.k, kStretch), kDequantizeThreads, &call);
}

std::string_view refuses(const DequantizeArgs& args) { return args.indices ? "some rows are wanted" : ""; }

constexpr Kernel<DequantizeArgs> kRows[] = {{"dequantize_panels_cuda", refuses, run_dequantize}};

}  // namespace

Source dequantize_source(Format format) {
  const std::string name(kFormatNames[static_cast<int>(format)]);
  return {concat("dequantize of ", name),
          concat("#include \"cuda/quantize/dequantize.cuh\"\n",
                 kernel_text("dequantize", "kDequantizeThreads", "DequantizeCall",
                             concat("dequantize<lowbit::Format::", name, ">")))};
}

void add_quantize_rows(Backend& backend) { add_rows(backend, kRows, std::size(kRows)); }

}  // namespace lowbit::cuda
