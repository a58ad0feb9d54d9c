// SPDX-License-Identifier: Apache-2.0
#include "cuda/experts/sources.hpp"

#include "gpu/refuses_format.hpp"

namespace lowbit::cuda {
namespace {

std::string name_of(Format format) { return std::string(kFormatNames[static_cast<int>(format)]); }
std::string text_of(Format format) { return "lowbit::Format::" + name_of(format); }
std::string_view text_of(bool value) { return value ? "true" : "false"; }

int parts_of(Format format) { return (significant_bits(format) + 7) / 8; }

}  // namespace

Source activations_source(const LinearKind& kind) {
  const std::string text = "#include \"gpu/linear/activations.cuh\"\n";
  if (kind.x_parts == 0)
    return {concat("int8 activations for ", name_of(kind.format), " with ", kind.tile_groups, " scales a tile",
                   kind.matrices ? ", as matrices" : ""),
            concat(text, early_kernel_text("activations", "kLinearThreads", "LinearCall",
                                           concat("quantize_rows<", text_of(kind.format), ", ", kind.tile_groups, ", ",
                                                  text_of(kind.matrices), ">")))};
  if (kind.matrices)
    return {kind.coded ? "int8 activations as matrices of float16" : "activations as matrices",
            concat("#include \"cuda/linear/matrices.cuh\"\n",
                   early_kernel_text("activations", "kLinearThreads", "LinearCall",
                                     kind.coded ? "order_codes" : "order_matrices"))};
  const bool swapped = !is_float(kind.format), alone = parts_of(kind.format) > 1;
  return {concat("activations in ", kind.x_parts, " parts", swapped ? ", for codes" : "", alone ? " of parts" : ""),
          concat(text, early_kernel_text("activations", "kLinearThreads", "LinearCall",
                                         concat("order_floats<", kind.x_parts, ", ", text_of(swapped), ", ",
                                                text_of(alone), ">")))};
}

std::string arguments_of(const LinearKind& kind) {
  return concat(text_of(kind.format), ", ", kind.x_parts, ", ", kind.tile_groups, ", ", text_of(kind.asymmetric), ", ",
                kind.rows, ", ", text_of(kind.in_place));
}

Source linear_source(const LinearKind& kind) {
  return {concat("linear of ", name_of(kind.format), kind.asymmetric ? " with zero points" : "", ", ",
                 kind.tile_groups, " scales a tile, ",
                 kind.in_place  ? "activations in place"
                 : kind.x_parts ? concat("activations in ", kind.x_parts, " parts")
                                : "int8 activations",
                 ", ", kind.rows, kind.rows == 1 ? " row" : " rows"),
          concat("#include \"cuda/linear/product.cuh\"\n",
                 kernel_text("linear", "kLinearThreads", "ProductCall", concat("linear<", arguments_of(kind), ">")))};
}

Source splits_source(const LinearKind& kind) {
  const bool codes = kind.x_parts == 0;
  return {concat("linear in splits of ", name_of(kind.format),
                 codes ? concat(", int8 activations, ", kind.tile_groups ? "scaled" : "whole", " sums") : ""),
          concat("#include \"cuda/linear/sums.cuh\"\n",
                 early_kernel_text("add_splits", "kLinearThreads", "ProductCall",
                                   concat("add_splits<", text_of(kind.format), ", ", text_of(codes), ", ",
                                          kind.tile_groups ? 1 : 0, ">")))};
}

Source code_tiles_source(const LinearKind& kind) {
  return {concat("linear by tiles of ", name_of(kind.format), kind.asymmetric ? " with zero points" : "", ", ",
                 kind.tile_groups, " scales a tile, int8 activations, ", kind.rows, " rows"),
          concat("#include \"cuda/linear/code_tiles.cuh\"\n",
                 kernel_text("linear_code_tiles", "kTileThreads", "LinearCall",
                             concat("linear_code_tiles<", text_of(kind.format), ", ", kind.tile_groups, ", ",
                                    text_of(kind.asymmetric), ", ", kind.rows / kRowsAtOnce, ">")))};
}

Source wgmma_source(const LinearKind& kind) {
  const bool codes = kind.x_parts == 0;
  return {concat("linear by warpgroups of ", name_of(kind.format), kind.asymmetric ? " with zero points" : "", ", ",
                 kind.tile_groups, " scales a tile, ", codes ? "int8" : name_of(kind.dtype), " activations, ",
                 kind.rows, " rows"),
          concat("#include \"cuda/linear/wgmma.cuh\"\n",
                 kernel_text("linear_wgmma", concat("kThreadsOf<", kind.rows, ">"),
                             "WgmmaCall",
                             concat("linear_wgmma<", text_of(kind.format), ", ", text_of(codes), ", lowbit::DType::",
                                    name_of(kind.dtype), ", ", kind.tile_groups, ", ", text_of(kind.asymmetric), ", ",
                                    kind.rows, ">")))};
}

Source decoded_source(Format format, bool codes) {
  const std::string specialised = concat("<", text_of(format), ", ", text_of(codes), ">");
  return {concat("linear of many rows of ", name_of(format), codes ? ", int8 activations" : ""),
          concat("#include \"cuda/linear/decoded.cuh\"\n",
                 kernel_text("decode_columns", "kLinearThreads", "DecodedCall", "decode_columns" + specialised),
                 codes ? kernel_text("code_rows", "kLinearThreads", "DecodedCall", "code_rows") : "",
                 kernel_text("finish_products", "kLinearThreads", "DecodedCall", "finish_products" + specialised))};
}

void add_wgmma_sources(std::vector<Source>& all, const LinearKind& kind) {
  LinearKind made = kind.by_warpgroups(DType::bfloat16);
  add_once(all, activations_source(made));
  for (made.rows = parts_of(made.format) > 1 ? 32 : 64; made.rows <= made.max_wgmma_rows(); made.rows *= 2)
    all.push_back(wgmma_source(made));
}

std::vector<Source> linear_sources(const std::string& architecture) {
  std::vector<Source> all;
  const auto add = [&](LinearKind kind) {
    add_once(all, activations_source(kind)), add_once(all, splits_source(kind));
    add_experts_sources(all, kind);
    for (; kind.rows <= kind.max_rows(); kind.rows *= 2) {
      all.push_back(linear_source(kind));
      if (kind.x_parts != 1 || !can_be_in_place(kind.format)) continue;
      LinearKind in_place = kind;
      in_place.in_place = true, all.push_back(linear_source(in_place));
      if (kind.rows == 8) in_place.rows = 1, all.push_back(linear_source(in_place));
    }
    if (kind.x_parts) return;
    kind.rows = 64, all.push_back(code_tiles_source(kind));
  };
  for (int number = 0; number < static_cast<int>(std::size(kFormatNames)); number++) {
    const auto format = static_cast<Format>(number);
    if (!gpu::refuses_format(format).empty()) continue;
    const bool integer = is_integer(format);
    for (int codes = 0; codes <= integer; codes++) all.push_back(decoded_source(format, codes == 1));
    const bool has_wgmma = architecture == kHopper && bits(format) < 32;
    for (int x_parts = integer ? 0 : 1; x_parts <= 3; x_parts++) {
      if (is_float(format)) {
        add({format, x_parts, 0, false, 8});
        if (has_wgmma && x_parts == 1) add_wgmma_sources(all, {format, 1, 0, false, 8});
        continue;
      }
      const int most = !integer && smallest_group(format) == 16 ? 4 : 2;
      for (int groups = 0; groups <= most; groups = groups ? 2 * groups : 1)
        for (int asymmetric = 0; asymmetric <= (integer && groups); asymmetric++) {
          add({format, x_parts, groups, asymmetric == 1, 8});
          if (has_wgmma && x_parts < 2) add_wgmma_sources(all, {format, x_parts, groups, asymmetric == 1, 8});
        }
    }
  }
  return all;
}

}  // namespace lowbit::cuda
