// SPDX-License-Identifier: Apache-2.0
// Host code of a product of few rows: which kernel, its argument, and the launch that brings its activations into
// order.
#pragma once

#include <bit>

#include "cuda/linear/call.hpp"
#include "cuda/runtime/driver.hpp"
#include "cuda/sources.hpp"
#include "gpu/refuses_format.hpp"
#include "ops/linear.hpp"

namespace lowbit::cuda {

inline int x_parts(const LinearArgs& args) {
  switch (args.x_format) {
    case XFormat::floating: return args.dtype == DType::float32 ? 3 : args.dtype == DType::float16 ? 2 : 1;
    case XFormat::float8_row: return 1;  // the scale of the row is applied at the end
    default: return 0;
  }
}

// Rows of bfloat16, at multiples of 16 bytes and of whole tiles, with a weight of one part, or one of levels, where inf
// may give nan in any case, as one level is 0.
inline bool is_read_in_place(const LinearArgs& args) {
  return args.x_format == XFormat::floating && args.dtype == DType::bfloat16 && args.weight_spec.k % kTileK == 0 &&
         reinterpret_cast<std::uintptr_t>(args.x) % 16 == 0 && can_be_in_place(args.weight_spec.format);
}

inline LinearKind kind_of(const LinearArgs& args) {
  const WeightSpec& spec = args.weight_spec;
  LinearKind kind{spec.format, x_parts(args), tile_groups(spec), spec.asymmetric, kRowsAtOnce, is_read_in_place(args)};
  if (kind.in_place && args.m == 1) kind.rows = 1;
  else while (kind.rows < kind.max_rows() && kind.rows < args.m) kind.rows *= 2;
  return kind;
}

// Whether activations as matrices have their original values, so that no row has a scale.
inline bool as_they_are(const LinearKind& kind) { return kind.matrices && kind.x_parts && !kind.coded; }
inline bool has_row_scale(const LinearKind& kind) { return !kind.in_place && !as_they_are(kind); }

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
inline int ctas_of_row(const LinearArgs& args, const LinearKind& kind) {
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

inline SourceKey key_of(SourceKind source, const LinearKind& kind) {
  return {static_cast<int64_t>(source), static_cast<int64_t>(kind.format), kind.x_parts,
          static_cast<int64_t>(kind.tile_groups) * 2 + kind.asymmetric, kind.rows * 2 + kind.in_place};
}

inline int64_t groups_of_panels(const LinearArgs& args, const LinearKind& kind) {
  return ceil_div(args.weight_spec.panels(), kind.shape().panels());
}

// Why no product here can read the weight, which lanes read by 8 and 16 bytes: a misaligned address would
// destroy the context.
inline std::string_view refuses_weight(const LinearArgs& args) {
  const std::string_view reason = gpu::refuses_format(args.weight_spec.format);
  if (!reason.empty()) return reason;
  if (args.low_rank) return kNoLowRank;
  if (lacks_groups(args.weight_spec)) return kNoSmallGroups;
  if (reinterpret_cast<std::uintptr_t>(args.weight) % 16)
    return "a weight that does not begin at a multiple of 16 bytes";
  return "";
}

}  // namespace lowbit::cuda
