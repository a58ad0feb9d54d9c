// SPDX-License-Identifier: Apache-2.0
// Rows of the op linear: activations are reordered, then multiplied (gpu/linear/call.hpp), by dpas if the
// device has it.
#include <bit>

#include "gpu/linear/call.hpp"
#include "gpu/refuses_format.hpp"
#include "level_zero/backend.hpp"
#include "level_zero/runtime/program.hpp"
#include "ops/linear.hpp"

namespace lowbit::level_zero {
namespace {

using gpu::LinearCall;
using gpu::RowSum;

constexpr int kActivationThreads = 256, kWorkers = 8;  // as in activations.spirv.cpp and groups.hpp
constexpr int64_t kMinManyRows = 64;                // min rows for decoding a weight once for many

// How a call is run. lanes: sub-group size for dpas; 0: without dpas.
struct LinearKind {
  int lanes, x_parts, scales_per_tile;
  bool codes, asymmetric;

  LinearKind(const LinearArgs& args, int lanes)
      : lanes(lanes), x_parts(0),
        scales_per_tile(is_float(args.weight_spec.format) ? 0 : gpu::tile_groups(args.weight_spec)),
        codes(!stays_float(args.x_format)), asymmetric(args.weight_spec.asymmetric) {
    if (args.x_format == XFormat::float8_row) x_parts = 1;  // the scale of the row is applied at the end
    else if (!codes) x_parts = args.dtype == DType::float32 ? 3 : args.dtype == DType::float16 ? 2 : 1;
  }

  int64_t many_rows() const { return lanes == 16 ? 128 : 64; }
  int64_t rows_at_once(int64_t m) const { return m == 1 ? 1 : lanes && m >= kMinManyRows ? many_rows() : 8; }
  const char* kernel(int64_t m) const {
    return m == 1 ? "linear_1" : rows_at_once(m) == 8 ? "linear_8" : "linear_many";
  }
  int threads() const { return kWorkers * (lanes ? lanes : 16); }
  std::string_view module() const {
    switch (lanes) {
      case 8: return codes ? "linear_codes_dpas8" : "linear_floats_dpas8";
      case 16: return codes ? "linear_codes_dpas16" : "linear_floats_dpas16";
      default: return codes ? "linear_codes_portable" : "linear_floats_portable";
    }
  }
  // In the order of constants.hpp.
  std::array<int32_t, 9> constants(Format format) const {
    return {bits(format), (significant_bits(format) + 7) / 8, lanes ? x_parts : 0, scales_per_tile,
            asymmetric, is_float(format), format == Format::bfloat16, is_table(format),
            format == Format::fp8_e4m3};
  }
  bool sums_rows() const { return codes || asymmetric; }
};

// The workspace of a call: reordered activations, and sums and scales of their rows.
struct WorkspaceLayout {
  int64_t ordered, sums, rows;  // bytes
  WorkspaceLayout(const LinearArgs& args, const LinearKind& kind) {
    const int64_t m = round_up(args.m, larger(kind.rows_at_once(args.m), 8)), tiles = args.weight_spec.tiles(),
                  bytes = kind.codes ? 1 : kind.lanes ? 2 * kind.x_parts : 4;
    ordered = m * args.weight_spec.padded_k() * bytes;
    sums = kind.sums_rows() ? m * larger(tiles * kind.scales_per_tile, 1) * static_cast<int64_t>(sizeof(RowSum)) : 0;
    rows = round_up(args.m * 4, 16);
  }
};

void order_activations(const LinearArgs& args, const LinearKind& kind, const LinearCall& call) {
  const Program& kernels = program(args.place, "linear_activations");
  const auto launch = [&](const char* kernel, int64_t groups) {
    kernels.launch(args.place, kernel, groups, kActivationThreads, &call, sizeof call);
  };
  if (kind.codes) return launch(kind.scales_per_tile ? "code_groups" : "code_rows", args.m);
  constexpr const char* kOrdered[] = {"order_1", "order_2", "order_3"};
  launch(kind.lanes ? kOrdered[kind.x_parts - 1] : "widen_rows", args.m);
  if (kind.asymmetric) launch("sum_rows", ceil_div(args.m * call.tiles * kind.scales_per_tile, kActivationThreads));
}

void run_linear(const LinearArgs& args, int lanes) {
  const WeightSpec& spec = args.weight_spec;
  const LinearKind kind(args, lanes);
  const WorkspaceLayout layout(args, kind);
  const Workspace workspace("linear", args.place, layout.ordered + layout.sums + 2 * layout.rows);
  LinearCall call{.spec = spec, .sections = PanelLayout::sections(spec), .weight = args.weight, .x = args.x,
                  .m = args.m, .tiles = static_cast<int32_t>(spec.tiles()),
                  .groups = static_cast<int32_t>(spec.groups()), .group_shift = 0, .dtype = args.dtype,
                  .bias_dtype = args.bias_dtype, .x_format = args.x_format, .activation = args.activation,
                  .bias = args.bias, .mul = args.mul, .add = args.add, .y = args.y,
                  .ordered = workspace.at(0), .sums = static_cast<RowSum*>(workspace.at(layout.ordered)),
                  .row_scale = static_cast<float*>(workspace.at(layout.ordered + layout.sums)),
                  .row_offset = static_cast<float*>(workspace.at(layout.ordered + layout.sums + layout.rows))};
  if (spec.group_size)
    call.group_shift = std::countr_zero(static_cast<uint64_t>(spec.group_size * kind.scales_per_tile / kTileK));
  order_activations(args, kind, call);
  const auto constants = kind.constants(spec.format);
  program(args.place, kind.module(), {.constants = constants})
      .launch(args.place, kind.kernel(args.m), spec.panels() * ceil_div(args.m, kind.rows_at_once(args.m)),
              kind.threads(), &call, sizeof call);
}

void run_dpas(const LinearArgs& args) { run_linear(args, dpas_lanes(args.place)); }
void run_portable(const LinearArgs& args) { run_linear(args, 0); }

// Whether weights.hpp and portable.hpp read a format. Others are only quantized and dequantized on the GPU.
constexpr bool is_read(Format format) {
  return is_integer(format) || is_table(format) || format == Format::float32 || format == Format::bfloat16 ||
         format == Format::float16 || format == Format::fp8_e4m3;
}

template <Format kFormat, bool kCodes>
std::string_view refuses(const LinearArgs& args) {
  if (args.weight_spec.format != kFormat) return "another weight format";
  if (!is_read(kFormat)) return "the products on Intel GPUs do not read this format";
  if (args.low_rank) return kNoLowRank;
  if (gpu::lacks_groups(args.weight_spec)) return gpu::kNoSmallGroups;
  if (stays_float(args.x_format) == kCodes) return kCodes ? "float activations" : "int8 activations";
  if (kCodes && args.weight_spec.k > gpu::kMaxCodesK) return "k above 131072: an int32 cannot hold the sum";
  return "";
}
template <Format kFormat, bool kCodes>
std::string_view refuses_dpas(const LinearArgs& args) {
  const std::string_view reason = refuses<kFormat, kCodes>(args);
  return !reason.empty() || dpas_lanes(args.place) ? reason : "the device has no dpas";
}

template <Format kFormat, bool kCodes>
void add_format_rows(Backend& backend, std::string_view of_dpas, std::string_view of_any) {
  const Kernel<LinearArgs> rows[] = {{of_dpas, refuses_dpas<kFormat, kCodes>, run_dpas},
                                     {of_any, refuses<kFormat, kCodes>, run_portable}};
  const bool served = gpu::refuses_format(kFormat).empty() && (!kCodes || is_integer(kFormat));
  add_rows(backend, rows, served ? 2 : 0);
}

}  // namespace

void add_linear_rows(Backend& backend) {
#define LOWBIT_FORMAT(name, Codec)                                                                               \
  add_format_rows<Format::name, false>(backend, "linear_" #name "_dpas_level_zero", "linear_" #name "_level_zero"); \
  add_format_rows<Format::name, true>(backend, "linear_" #name "_int8_dpas_level_zero",                          \
                                      "linear_" #name "_int8_level_zero");
  LOWBIT_FORMATS(LOWBIT_FORMAT)
#undef LOWBIT_FORMAT
}

}  // namespace lowbit::level_zero
