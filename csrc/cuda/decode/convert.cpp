// SPDX-License-Identifier: Apache-2.0
// Rows of the ops kv_quantize and kv_dequantize.
#include "cuda/decode/convert.hpp"

#include "cuda/backend.hpp"
#include "cuda/decode/kind.hpp"
#include "gpu/attention/make_call.hpp"

namespace lowbit::cuda {
namespace {

KvConvertCall call_of(const TensorView& x, const TensorView& codes, const TensorView& scale, bool rotated) {
  return {.x = rows_of(x), .codes = rows_of(codes), .scale = rows_of(scale), .x_dtype = x.dtype,
          .scale_dtype = scale.dtype, .rows = x.size(0) * x.size(1) * x.size(2), .heads = x.size(1),
          .length = x.size(2), .columns = static_cast<int32_t>(x.size(3)), .rotated = rotated};
}

void launch(const Place& place, KvFormat format, const KvConvertCall& call, const char* kernel) {
  const auto groups = static_cast<int>(kv_padded(call.columns) / kKvGroup);
  program(place, {static_cast<int64_t>(SourceKind::kv_convert), static_cast<int64_t>(format), groups},
          [&] { return kv_convert_source(format, groups); })
      .launch(place, kernel, ceil_div(call.rows, kDecodeWarps), kDecodeThreads, &call);
}
void run_quantize(const KvQuantizeArgs& args) {
  launch(args.place, args.format(), call_of(args.x, args.codes, args.scale, args.rotate), "kv_quantize");
}
void run_all(const KvDequantizeArgs& args) { run_dequantize(args, 0, args.x.size(0) * args.x.size(1)); }

template <class Args>
std::string_view refuses(const Args& args) {
  return ceil_div(args.x.numel(), args.x.size(3)) >= INT32_MAX ? "more than 2^31 rows" : "";
}

constexpr Kernel<KvQuantizeArgs> kQuantize[] = {{"kv_quantize_cuda", refuses<KvQuantizeArgs>, run_quantize}};
constexpr Kernel<KvDequantizeArgs> kDequantize[] = {{"kv_dequantize_cuda", refuses<KvDequantizeArgs>, run_all}};

}  // namespace

void run_dequantize(const KvDequantizeArgs& args, int64_t first, int64_t heads) {
  KvConvertCall call = call_of(args.x, args.codes, args.scale, args.rotated);
  call.first = first * call.length, call.rows = heads * call.length;
  if (call.rows) launch(args.place, args.format(), call, "kv_dequantize");
}

void add_cache_rows(Backend& backend) {
  add_rows(backend, kQuantize, std::size(kQuantize)), add_rows(backend, kDequantize, std::size(kDequantize));
}

}  // namespace lowbit::cuda
