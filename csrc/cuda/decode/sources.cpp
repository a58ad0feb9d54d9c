// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/mods.hpp"
#include "cuda/decode/kind.hpp"
#include "ops/decode.hpp"
#include "score/program_hash.hpp"

namespace lowbit::cuda {
namespace {

std::string_view name_of_cache(DType cache) {
  return cache == DType::int8 ? "int8 codes" : cache == DType::uint8 ? "int4 codes" : name_of(cache);
}

}  // namespace

// Codes are exact in bfloat16; other queries take two parts. A lane holds 64 accumulators: two tiles of rows with 128
// columns, or one with 256.
DecodeKind kind_of(const DecodeArgs& args) {
  const int64_t rows = args.group() * args.q_length();
  const auto groups_of = [](const TensorView& of) { return static_cast<int>(kv_padded(of.size(3)) / kKvGroup); };
  const bool exact = args.format() == KvFormat::floating || (args.q.dtype == DType::bfloat16 && !args.rotated);
  const int v_groups = groups_of(args.out), tiles = rows <= 8 || v_groups > 4 ? 1 : 2;
  return {{args.k.dtype, groups_of(args.q), v_groups, exact ? 1 : 2, tiles}, args.score_mod, args.mask_mod};
}

SourceKey DecodeKind::key() const {
  const int64_t mods = (score ? 1 : 0) + (mask ? 2 : 0),
                how = (static_cast<int64_t>(shape.cache) * 8 + shape.parts) * 8;
  return {static_cast<int64_t>(SourceKind::decode), (how + shape.tiles) * 4 + mods,
          static_cast<int64_t>(shape.groups) << 32 | shape.v_groups, ProgramHash(score).value(),
          ProgramHash(mask).value()};
}

Source decode_source(const DecodeKind& kind) {
  const DecodeShape& shape = kind.shape;
  const bool is_small = shape.is_small() && !kind.score && !kind.mask;
  return {concat("decode of ", name_of_cache(shape.cache), ", head dims up to ", shape.groups * kKvGroup, " and ",
                 shape.v_groups * kKvGroup, ", queries in ", shape.parts, " parts, ", shape.rows(), " rows",
                 kind.score ? ", a score_mod" : "", kind.mask ? ", a mask_mod" : ""),
          concat("#include \"cuda/decode/decode.cuh\"\n", mods_text(kind.score, kind.mask, Gradient::none, ""),
                 kernel_text("clear_fault", "kDecodeThreads", "DecodeCall", "clear_fault"),
                 kernel_text("decode", is_small ? "kSmallDecodeThreads" : "kDecodeThreads", "DecodeCall",
                             concat("decode<lowbit::DType::", name_of(shape.cache), ", ", shape.groups, ", ",
                                    shape.v_groups, ", ", shape.parts, ", ", shape.tiles, ", Mods>")))};
}

Source combine_source() {
  return {"splits of decode", concat("#include \"cuda/decode/splits.cuh\"\n",
                                     kernel_text("combine", "kDecodeThreads", "DecodeCall", "combine"))};
}

Source kv_convert_source(KvFormat format, int groups) {
  const std::string of = concat("<lowbit::KvFormat::", format == KvFormat::int8 ? "int8" : "int4", ", ", groups, ">");
  return {concat("rows of up to ", groups * kKvGroup, " columns to ", format == KvFormat::int8 ? "int8" : "int4",
                 " codes"),
          concat("#include \"cuda/decode/convert.cuh\"\n",
                 kernel_text("kv_quantize", "kDecodeThreads", "KvConvertCall", "kv_quantize" + of),
                 kernel_text("kv_dequantize", "kDecodeThreads", "KvConvertCall", "kv_dequantize" + of))};
}

// A step with bfloat16 queries and head dims of 128 over each cache format, and a prompt.
void add_decode_sources(std::vector<Source>& all) {
  all.push_back(combine_source());
  for (const KvFormat format : {KvFormat::int8, KvFormat::int4}) all.push_back(kv_convert_source(format, 4));
  for (const int tiles : {1, 2}) {
    all.push_back(decode_source({{DType::int8, 4, 4, 1, tiles}}));
    all.push_back(decode_source({{DType::uint8, 4, 4, 2, tiles}}));
  }
  all.push_back(decode_source({{DType::bfloat16, 4, 4, 1, 1}}));
}

}  // namespace lowbit::cuda
