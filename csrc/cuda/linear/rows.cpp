// SPDX-License-Identifier: Apache-2.0
// Rows of the op linear: activations are reordered, then multiplied (call.hpp).
#include "cuda/backend.hpp"
#include "cuda/linear/make_product_call.hpp"

namespace lowbit::cuda {
namespace {

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
