// SPDX-License-Identifier: Apache-2.0
// Rows of the op dequantize: for a whole weight, and for some of its rows.
#include "cuda/backend.hpp"
#include "cuda/sources.hpp"
#include "gpu/quantize/make_dequantize_call.hpp"
#include "gpu/refuses_format.hpp"

namespace lowbit::cuda {
namespace {

void run_dequantize(const DequantizeArgs& args) {
  const WeightSpec& spec = args.spec;
  const int64_t rows = args.indices ? args.indices.numel() : spec.n;
  const DequantizeCall call = dequantize_call(args, nullptr);
  program(args.place, {static_cast<int64_t>(SourceKind::dequantize), static_cast<int64_t>(spec.format),
                       static_cast<int64_t>(args.layout)},
          [&] { return dequantize_source(spec.format, args.layout); })
      .launch(args.place, "dequantize", rows * ceil_div(spec.k, kStretch), kDequantizeThreads, &call);
}

std::string_view takes_all(const DequantizeArgs& args) {
  return args.indices ? "some rows are wanted" : gpu::refuses_format(args.spec.format);
}
std::string_view takes_rows(const DequantizeArgs& args) {
  return args.indices ? gpu::refuses_format(args.spec.format) : "all of the weight is wanted";
}

constexpr Kernel<DequantizeArgs> kRows[] = {{"dequantize_panels_cuda", takes_all, run_dequantize},
                                            {"dequantize_rows_cuda", takes_rows, run_dequantize}};

std::string_view type_of(Layout layout) {
  switch (layout) {
#define LOWBIT_LAYOUT(id, Type, name) \
  case Layout::id: return #Type;
    LOWBIT_LAYOUTS(LOWBIT_LAYOUT)
#undef LOWBIT_LAYOUT
  }
  __builtin_unreachable();
}

}  // namespace

Source dequantize_source(Format format, Layout layout) {
  const std::string name(kFormatNames[static_cast<int>(format)]);
  return {concat("dequantize of ", name, " in ", kLayoutNames[static_cast<int>(layout)]),
          concat("#include \"gpu/quantize/dequantize.cuh\"\n",
                 kernel_text("dequantize", "kDequantizeThreads", "DequantizeCall",
                             concat("dequantize<lowbit::Format::", name, ", lowbit::", type_of(layout), ">")))};
}

void add_quantize_rows(Backend& backend) { add_rows(backend, kRows, std::size(kRows)); }

}  // namespace lowbit::cuda
