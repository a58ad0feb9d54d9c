// SPDX-License-Identifier: Apache-2.0
// Rows of the ops decode, kv_quantize and kv_dequantize.
#include "level_zero/attention/mods.hpp"
#include "level_zero/backend.hpp"
#include "level_zero/decode/call.hpp"
#include "ops/aligned_rows.hpp"
#include "ops/decode.hpp"

namespace lowbit::level_zero {
namespace {

gpu::HeadRows head_rows(const TensorView& tensor) {
  if (!tensor) return {};
  return {tensor.data, tensor.stride[0], tensor.stride[1], tensor.stride[2]};
}

KvRows kv_rows(const TensorView& rows, const TensorView& scales, KvFormat format, int64_t columns) {
  return {.rows = head_rows(rows), .scales = head_rows(scales), .kind = static_cast<KvKind>(format),
          .dtype = rows.dtype, .scale_dtype = scales.dtype, .columns = static_cast<int32_t>(columns),
          .padded = static_cast<int32_t>(kv_padded(columns))};
}

// Columns of a tile in local memory.
int64_t tile_columns(const DecodeArgs& args) {
  const int64_t most = larger(args.q.size(3), args.out.size(3));
  return args.format() == KvFormat::floating ? most : kv_padded(most);
}

DecodeCall call_of(const DecodeArgs& args, const CallMods& mods, float* partial) {
  const int64_t e = args.q.size(3), ev = args.out.size(3);
  DecodeCall call{.q = head_rows(args.q), .out = head_rows(args.out),
                  .k = kv_rows(args.k, args.k_scale, args.format(), e),
                  .v = kv_rows(args.v, args.v_scale, args.format(), ev), .dtype = args.q.dtype,
                  .bias_dtype = args.mask.dtype, .batch = static_cast<int32_t>(args.batch()),
                  .heads = static_cast<int32_t>(args.heads()), .group = static_cast<int32_t>(args.group()),
                  .length = static_cast<int32_t>(args.q_length()),
                  .kv_length = static_cast<int32_t>(args.kv_length()),
                  .row_tiles = static_cast<int32_t>(ceil_div(args.group() * args.q_length(), kDecodeRows)),
                  .splits = static_cast<int32_t>(ceil_div(args.kv_length(), kSplit)), .position = args.position,
                  .window = args.window, .scale = static_cast<float>(args.scale), .causal = args.causal,
                  .rotation = args.rotated ? static_cast<int32_t>(kv_rotation(e)) : 0, .lse = args.lse.as<float>(),
                  .sink = args.sink.as<const float>(), .bias = args.mask.data, .score = mods.score(),
                  .mask = mods.mask(), .partial = partial};
  for (int d = 0; d < 4; d++) call.bias_stride[d] = args.mask ? args.mask.stride[d] : 0;
  return call;
}

void run_decode(const DecodeArgs& args) {
  const int64_t rows = args.batch() * args.heads() * args.q_length(), splits = ceil_div(args.kv_length(), kSplit);
  const Workspace workspace("decode", args.place, CallMods::kBytes + rows * splits * (args.out.size(3) + 2) * 4);
  const CallMods mods(args.place, args.score_mod, args.mask_mod, workspace.at(0), args.score_mod || args.mask_mod);
  const DecodeCall call = call_of(args, mods, static_cast<float*>(workspace.at(CallMods::kBytes)));
  const int64_t groups = args.batch() * args.kv_heads() * call.row_tiles * splits;
  if (groups)
    mods.program("decode", "decode_mods")
        .launch(args.place, kernel_of(kernel_columns(tile_columns(args)), {"decode_64", "decode_128", "decode_256"}),
                groups, kAttentionThreads, &call, sizeof call);
  program(args.place, "kv_codes")
      .launch(args.place, "decode_combine", ceil_div(rows, kSubGroups), kAttentionThreads, &call, sizeof call);
  mods.check_fault("decode");
}

template <class Args>
KvCodesCall codes_call(const Args& args, bool rotates) {
  return {.x = head_rows(args.x), .codes = kv_rows(args.codes, args.scale, args.format(), args.x.size(3)),
          .dtype = args.x.dtype, .batch = static_cast<int32_t>(args.x.size(0)),
          .heads = static_cast<int32_t>(args.x.size(1)), .length = static_cast<int32_t>(args.x.size(2)),
          .rotation = rotates ? static_cast<int32_t>(kv_rotation(args.x.size(3))) : 0};
}

void run_codes(const Place& place, const char* kernel, const KvCodesCall& call) {
  const int64_t rows = int64_t{call.batch} * call.heads * call.length;
  program(place, "kv_codes").launch(place, kernel, ceil_div(rows, kSubGroups), kAttentionThreads, &call, sizeof call);
}
void run_quantize(const KvQuantizeArgs& args) { run_codes(args.place, "kv_quantize", codes_call(args, args.rotate)); }
void run_dequantize(const KvDequantizeArgs& args) {
  run_codes(args.place, "kv_dequantize", codes_call(args, args.rotated));
}

// Codes are read by dwords.
bool is_aligned(const TensorView& codes) { return has_aligned_rows(codes, 4); }
constexpr std::string_view kUnaligned = "rows of codes must begin at multiples of 4 bytes";

std::string_view refuses_decode(const DecodeArgs& args) {
  if (tile_columns(args) > kMaxColumns) return "head dims above 256";
  if (args.format() != KvFormat::floating && !(is_aligned(args.k) && is_aligned(args.v))) return kUnaligned;
  if (args.mask && args.mask.dtype == DType::float64) return "a mask of float64";
  for (const ScoreCall* mod : {args.score_mod, args.mask_mod})
    if (const std::string_view reason = refuses_mod(mod); !reason.empty()) return reason;
  return args.batch() * args.heads() * args.q_length() >= INT32_MAX ? "more than 2^31 rows" : "";
}
std::string_view refuses_quantize(const KvQuantizeArgs&) { return ""; }
std::string_view refuses_dequantize(const KvDequantizeArgs& args) { return is_aligned(args.codes) ? "" : kUnaligned; }

constexpr Kernel<DecodeArgs> kDecode[] = {{"decode_splits_level_zero", refuses_decode, run_decode}};
constexpr Kernel<KvQuantizeArgs> kQuantize[] = {{"kv_quantize_rows_level_zero", refuses_quantize, run_quantize}};
constexpr Kernel<KvDequantizeArgs> kDequantize[] = {
    {"kv_dequantize_rows_level_zero", refuses_dequantize, run_dequantize}};

}  // namespace

void add_decode_rows(Backend& backend) {
  add_rows(backend, kDecode, std::size(kDecode)), add_rows(backend, kQuantize, std::size(kQuantize));
  add_rows(backend, kDequantize, std::size(kDequantize));
}

}  // namespace lowbit::level_zero
