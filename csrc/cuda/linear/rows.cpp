// SPDX-License-Identifier: Apache-2.0
// Rows of the op linear: activations are reordered, then multiplied (call.hpp).
#include <bit>

#include "cuda/backend.hpp"
#include "cuda/linear/call.hpp"
#include "cuda/runtime/driver.hpp"
#include "cuda/sources.hpp"
#include "gpu/refuses_format.hpp"
#include "ops/linear.hpp"

namespace lowbit::cuda {
namespace {

int x_parts(const LinearArgs& args) {
  switch (args.x_format) {
    case XFormat::floating: return args.dtype == DType::float32 ? 3 : args.dtype == DType::float16 ? 2 : 1;
    case XFormat::float8_row: return 1;  // the scale of the row is applied at the end
    default: return 0;
  }
}

// Rows of bfloat16, at multiples of 16 bytes and of whole tiles, with a weight of one part, or one of levels, where inf
// may give nan in any case, as one level is 0.
bool is_read_in_place(const LinearArgs& args) {
  return args.x_format == XFormat::floating && args.dtype == DType::bfloat16 && args.weight_spec.k % kTileK == 0 &&
         reinterpret_cast<std::uintptr_t>(args.x) % 16 == 0 && can_be_in_place(args.weight_spec.format);
}

LinearKind kind_of(const LinearArgs& args) {
  const WeightSpec& spec = args.weight_spec;
  LinearKind kind{spec.format, x_parts(args), tile_groups(spec), spec.asymmetric, kRowsAtOnce, is_read_in_place(args)};
  if (kind.in_place && args.m == 1) kind.rows = 1;
  else while (kind.rows < kind.max_rows() && kind.rows < args.m) kind.rows *= 2;
  return kind;
}

// Whether activations as matrices have their original values, so that no row has a scale.
bool as_they_are(const LinearKind& kind) { return kind.matrices && kind.x_parts && !kind.coded; }
bool has_row_scale(const LinearKind& kind) { return !kind.in_place && !as_they_are(kind); }

// The workspace of a call: reordered activations, and sums and scales of their rows.
struct WorkspaceLayout {
  int64_t ordered, sums, rows, partial;  // bytes
  WorkspaceLayout(const LinearArgs& args, const LinearKind& kind, int splits)
      : ordered(kind.in_place ? 0
                              : round_up(args.m, kind.rows) * args.weight_spec.padded_k() *
                                    (kind.x_parts ? 2 * kind.x_parts : 1)),
        sums(kind.x_parts ? 0
                          : args.m * (kind.tile_groups ? args.weight_spec.tiles() * kind.tile_groups : 1) *
                                static_cast<int64_t>(sizeof(RowSum))),
        rows(has_row_scale(kind) ? round_up(args.m * 4 * (1 + kind.coded), 16) : 0),
        partial(splits > 1 ? 4 * splits * args.m * args.weight_spec.n : 0) {}
  int64_t at_rows() const { return ordered + sums; }
  int64_t all() const { return at_rows() + rows + partial; }
};

// CTAs that reorder a row of activations: a few rows alone would occupy few multiprocessors. A sum over all codes of a
// row is computed by one CTA.
int ctas_of_row(const LinearArgs& args, const LinearKind& kind) {
  if (kind.x_parts == 0 && kind.tile_groups == 0) return 1;
  const int64_t wanted = multiprocessors(args.place.device) * (kind.coded ? 4 : 1) / args.m,
                most = ceil_div(args.weight_spec.tiles(), 8);
  return static_cast<int>(larger(1, smaller(wanted, most)));
}

// Reorders activations, unless they are read in place, then calls launch(call), which multiplies them.
template <class Launch>
void run_ordered(const LinearArgs& args, const LinearKind& kind, int splits, Launch&& launch) {
  const WeightSpec& spec = args.weight_spec;
  const WorkspaceLayout layout(args, kind, splits);
  const Workspace workspace("linear", args.place, layout.all());
  auto* row_scale = has_row_scale(kind) ? static_cast<float*>(workspace.at(layout.at_rows())) : nullptr;
  ProductCall product{.call = {.spec = spec, .sections = PanelLayout::sections(spec), .weight = args.weight,
                               .x = args.x, .m = args.m, .tiles = static_cast<int32_t>(spec.tiles()),
                               .groups = static_cast<int32_t>(spec.groups()), .group_shift = 0, .dtype = args.dtype,
                               .bias_dtype = args.bias_dtype, .x_format = args.x_format,
                               .activation = args.activation, .bias = args.bias, .mul = args.mul, .add = args.add,
                               .y = args.y, .ordered = workspace.at(0),
                               .sums = static_cast<RowSum*>(workspace.at(layout.ordered)), .row_scale = row_scale,
                               .row_offset = row_scale + (kind.coded ? args.m : 0),
                               .ctas_of_row = ctas_of_row(args, kind),
                               .log2_of_rows = std::countr_zero(static_cast<uint32_t>(kind.rows))},
                      .splits = splits, .partial = workspace.at(layout.at_rows() + layout.rows)};
  LinearCall& call = product.call;
  if (spec.group_size)
    call.group_shift = std::countr_zero(static_cast<uint64_t>(spec.group_size * kind.tile_groups / kTileK));
  if (kind.in_place) return launch(product);
  const SourceKey of_activations{static_cast<int64_t>(SourceKind::activations), kind.x_parts,
                                 static_cast<int64_t>(kind.format), kind.tile_groups,
                                 kind.matrices + 2 * kind.coded};
  const int64_t ctas = as_they_are(kind) ? ceil_div(args.m * spec.tiles() * kChunks, kLinearThreads)
                                         : args.m * call.ctas_of_row;
  program(args.place, of_activations, [&] { return activations_source(kind); })
      .launch_early(args.place, "activations", ctas, kLinearThreads, &call);
  launch(product);
}

SourceKey key_of(SourceKind source, const LinearKind& kind) {
  return {static_cast<int64_t>(source), static_cast<int64_t>(kind.format), kind.x_parts,
          static_cast<int64_t>(kind.tile_groups) * 2 + kind.asymmetric, kind.rows * 2 + kind.in_place};
}

int64_t groups_of_panels(const LinearArgs& args, const LinearKind& kind) {
  return ceil_div(args.weight_spec.panels(), kind.shape().panels());
}

// The number of splits for few rows: enough for one CTA per multiprocessor, but at least 16 tiles each, two per warp.
// It does not depend on the number of rows: a row has the same bits in any batch of up to 16.
int splits_of(const LinearArgs& args, const LinearKind& kind) {
  if (args.m > 2 * kRowsAtOnce) return 1;
  constexpr int64_t kMax = 16;
  const int64_t wanted = multiprocessors(args.place.device) / groups_of_panels(args, kind),
                most = args.weight_spec.tiles() / (2 * kLinearWarps);
  return static_cast<int>(larger(1, smaller(wanted, smaller(most, kMax))));
}

// Adds the sums of the splits, if there are several.
void add_splits(const LinearArgs& args, const LinearKind& kind, const ProductCall& product) {
  if (product.splits == 1) return;
  const SourceKey of_splits{static_cast<int64_t>(SourceKind::splits), static_cast<int64_t>(kind.format),
                            kind.x_parts == 0, kind.tile_groups > 0};
  program(args.place, of_splits, [&] { return splits_source(kind); })
      .launch_early(args.place, "add_splits", ceil_div(args.m * ceil_div(args.weight_spec.n, 4), kLinearThreads),
                    kLinearThreads, &product);
}

void run_linear(const LinearArgs& args) {
  const LinearKind kind = kind_of(args);
  const int splits = splits_of(args, kind);
  run_ordered(args, kind, splits, [&](const ProductCall& product) {
    const int64_t ctas = groups_of_panels(args, kind) * ceil_div(args.m, kind.rows);
    program(args.place, key_of(SourceKind::linear, kind), [&] { return linear_source(kind); })
        .launch_early(args.place, "linear", ctas * splits, kLinearThreads, &product, kind.shape().bytes());
    add_splits(args, kind, product);
  });
}

LinearKind wgmma_kind(const LinearArgs& args) {
  LinearKind kind = kind_of(args).by_warpgroups(args.dtype);
  for (kind.rows = 32; kind.rows < kind.max_wgmma_rows() && kind.rows < args.m;) kind.rows *= 2;
  return kind;
}
int64_t columns_of_wgmma(const LinearArgs& args, const LinearKind& kind) {  // number of CTAs along the columns
  return ceil_div(args.weight_spec.panels(), kind.wgmma_shape().warps());
}

void run_wgmma(const LinearArgs& args) {
  const LinearKind kind = wgmma_kind(args);
  const WgmmaShape shape = kind.wgmma_shape();
  const int64_t ctas = columns_of_wgmma(args, kind) * ceil_div(args.m, kind.rows), tiles = args.weight_spec.tiles(),
                wanted = multiprocessors(args.place.device) / ctas, most = smaller(tiles / 4, 16),
                tiles_each = ceil_div(tiles, larger(1, smaller(wanted, most)));
  const auto splits = static_cast<int>(ceil_div(tiles, tiles_each));  // no split without a tile
  run_ordered(args, kind, splits, [&](const ProductCall& product) {
    SourceKey key = key_of(SourceKind::wgmma, kind);
    key.back() = kind.rows * 2 + (kind.dtype == DType::float16);
    const WgmmaCall call{product};
    program(args.place, key, [&] { return wgmma_source(kind); })
        .launch_early(args.place, "linear_wgmma", ctas * splits, shape.warps() * 32, &call, shape.bytes());
    add_splits(args, kind, product);
  });
}

// On an H200, at 8192 x 8192: 128 rows take 134 us for W8A8 and 141 for W4A8, in the other row 67 and 138.
constexpr int64_t kMinRowsOfTiles = 129, kRowsOfTile = 64;
int64_t code_tiles(const LinearArgs& args) {
  return ceil_div(args.weight_spec.panels(), kTilePanels) * ceil_div(args.m, kRowsOfTile);
}

void run_code_tiles(const LinearArgs& args) {
  LinearKind kind = kind_of(args);  // codes, which are reordered
  kind.rows = kRowsOfTile;
  run_ordered(args, kind, 1, [&](const ProductCall& product) {
    program(args.place, key_of(SourceKind::code_tiles, kind), [&] { return code_tiles_source(kind); })
        .launch(args.place, "linear_code_tiles", code_tiles(args), kTileThreads, &product.call);
  });
}

// Why no product here can read the weight, which lanes read by 8 and 16 bytes: a misaligned address would
// destroy the context.
std::string_view refuses_weight(const LinearArgs& args) {
  const std::string_view reason = gpu::refuses_format(args.weight_spec.format);
  if (!reason.empty()) return reason;
  if (args.low_rank) return kNoLowRank;
  if (lacks_groups(args.weight_spec)) return kNoSmallGroups;
  if (reinterpret_cast<std::uintptr_t>(args.weight) % 16)
    return "a weight that does not begin at a multiple of 16 bytes";
  return "";
}

template <Format kFormat, bool kCodes>
std::string_view refuses(const LinearArgs& args) {
  if (args.weight_spec.format != kFormat) return "another weight format";
  if (const std::string_view reason = refuses_weight(args); !reason.empty()) return reason;
  if (stays_float(args.x_format) == kCodes) return kCodes ? "float activations" : "int8 activations";
  if (kCodes && args.weight_spec.k > kMaxCodesK) return "k above 131072: an int32 cannot hold the sum";
  return "";
}

std::string_view refuses_code_tiles(const LinearArgs& args) {
  if (const std::string_view reason = refuses_weight(args); !reason.empty()) return reason;
  if (stays_float(args.x_format)) return "float activations";
  if (args.m < kMinRowsOfTiles) return "fewer than 129 rows";
  if (args.weight_spec.k > kMaxCodesK) return "k above 131072: an int32 cannot hold the sum";
  // By count: the other row decodes the weight again for each 16 or 32 rows, but with eight times the CTAs.
  if (2 * code_tiles(args) < multiprocessors(args.place.device)) return "fewer tiles than half of the multiprocessors";
  return "";
}

// On an H100, at 8192 x 8192. 32 rows: int4 28 us in the other row and 33 in this one, nf4 63 and 43, W4A8 80 and 62.
// 512 rows: int4 154 us by cuBLAS and 131 here, nf4 152 and 158; 1024: int4 237 and 266, int8 281 and 227. 4096 rows of
// W8A8: 679 us and 667.
std::string_view refuses_rows(const LinearArgs& args, bool exact) {
  const WeightSpec& spec = args.weight_spec;
  const bool floats = stays_float(args.x_format), slow = floats ? significant_bits(spec.format) > 8 : !exact;
  if (args.m < 17) return "fewer than 17 rows";
  if (args.m < 33 && !slow) return "fewer than 33 rows, which take less time by another row";
  if (exact && args.m > 4096) return "more than 4096 rows, which cuBLAS takes less time for";
  if (floats && args.m > (slow ? 256 : tile_groups(spec) ? 512 : 1024))
    return "so many rows that cuBLAS takes less time";
  return "";
}

std::string_view refuses_wgmma(const LinearArgs& args) {
  const WeightSpec& spec = args.weight_spec;
  const bool exact = !stays_float(args.x_format) && tile_groups(spec) == 0;
  if (const std::string_view reason = refuses_weight(args); !reason.empty()) return reason;
  if (const std::string_view reason = refuses_rows(args, exact); !reason.empty()) return reason;
  if (capability(args.place.device) != 90) return "a GPU of another compute capability than 9.0";
  if (bits(spec.format) == 32) return "a float32 weight";
  if (args.x_format == XFormat::float8_row) return "float8 activations";
  if (!exact && args.dtype == DType::float32) return "float32 activations: scaled weights would be rounded to 16 bits";
  if (exact && spec.k > kMaxCodesK) return "k above 131072: an int32 cannot hold the sum";
  // 1024 x 4096, 128 rows, on an H100: int4 14.3 us by cuBLAS and 16.7 here.
  if (16 * columns_of_wgmma(args, wgmma_kind(args)) < multiprocessors(args.place.device))
    return "columns for less than a sixteenth of the multiprocessors";
  return "";
}

template <Format kFormat>
void add_format_rows(Backend& backend, std::string_view of_floats, std::string_view of_codes) {
  const Kernel<LinearArgs> rows[] = {{of_floats, refuses<kFormat, false>, run_linear},
                                     {of_codes, refuses<kFormat, true>, run_linear}};
  if (gpu::refuses_format(kFormat).empty()) add_rows(backend, rows, is_integer(kFormat) ? 2 : 1);
}

}  // namespace

void add_linear_rows_of_warpgroups(Backend& backend) {
  const Kernel<LinearArgs> row{"linear_wgmma_cuda", refuses_wgmma, run_wgmma};
  add_rows(backend, &row, 1);
}

void add_linear_rows(Backend& backend) {
  const Kernel<LinearArgs> tiles{"linear_code_tiles_cuda", refuses_code_tiles, run_code_tiles};
  add_rows(backend, &tiles, 1);
#define LOWBIT_FORMAT(name, Codec) \
  add_format_rows<Format::name>(backend, "linear_" #name "_cuda", "linear_" #name "_int8_cuda");
  LOWBIT_FORMATS(LOWBIT_FORMAT)
#undef LOWBIT_FORMAT
}

}  // namespace lowbit::cuda
