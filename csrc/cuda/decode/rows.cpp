// SPDX-License-Identifier: Apache-2.0
// Rows of the op decode, and of attention with few queries. The host reads no data and waits for nothing.
#include "cuda/attention/mods.hpp"
#include "cuda/backend.hpp"
#include "cuda/decode/kind.hpp"
#include "gpu/attention/make_call.hpp"
#include "ops/aligned_rows.hpp"
#include "ops/decode.hpp"

namespace lowbit::cuda {
namespace {

CacheRows cache_of(const TensorView& tensor, const TensorView& scale) {
  CacheRows rows{.data = tensor.data, .batch = tensor.stride[0], .head = tensor.stride[1], .row = tensor.stride[2],
                 .pieces = static_cast<int>(tensor.size(3) * static_cast<int64_t>(size_of(tensor.dtype)) / 16)};
  if (!scale) return rows;
  rows.scale = scale.data, rows.scale_dtype = scale.dtype;
  rows.scale_batch = scale.stride[0], rows.scale_head = scale.stride[1], rows.scale_row = scale.stride[2];
  return rows;
}

// Divides the keys that some query sees into splits that do not depend on the number of heads: a result has the same
// bits in any batch. Many queries fill a GPU without splits. Longer splits cost less per key, as long as one sequence
// still fills a GPU: 8 heads are 128 CTAs from 2k keys on (H200, 4k keys, batch 16: 63 us with splits of 128, 47 with
// splits of 256).
void split_keys(int64_t kv_length, DecodeCall& call) {
  const KeyRange seen = call.seen(kv_length, 0, call.length - 1);
  const int64_t keys = seen.end - seen.first, most = larger(1, kMaxSplits / larger(1, call.row_blocks));
  call.first = seen.first, call.end = seen.end;
  const int64_t least = keys > 16 * kMinSplit ? 2 * kMinSplit : kMinSplit;
  call.split = larger(least, round_up(ceil_div(keys, most), kMinSplit));
  call.splits = static_cast<int32_t>(larger(1, ceil_div(keys, call.split)));
}

DecodeCall call_of(const DecodeArgs& args, const DecodeShape& shape) {
  DecodeCall call{.q = rows_of(args.q), .out = rows_of(args.out), .q_dtype = args.q.dtype,
                  .out_dtype = args.out.dtype,
                  .k = cache_of(args.k, args.k_scale), .v = cache_of(args.v, args.v_scale)};
  const auto number = [](int64_t of) { return static_cast<int32_t>(of); };
  call.heads = number(args.heads()), call.kv_heads = number(args.kv_heads()), call.group = number(args.group()),
  call.length = number(args.q_length()), call.columns = number(args.q.size(3)),
  call.v_columns = number(args.out.size(3)),
  call.row_blocks = number(ceil_div(args.group() * args.q_length(), shape.rows()));
  call.scale = static_cast<float>(args.scale), call.causal = args.causal, call.rotated = args.rotated,
  call.position = args.position, call.window = args.window;
  call.bias = args.mask.data, call.bias_dtype = args.mask.dtype;
  for (int d = 0; d < 4; d++) call.bias_stride[d] = args.mask ? args.mask.stride[d] : 0;
  call.sink = args.sink.as<const float>(), call.lse = args.lse.as<float>();
  call.score = captured_of(args.score_mod), call.mask = captured_of(args.mask_mod);
  split_keys(args.kv_length(), call);
  return call;
}

void run_decode(const DecodeArgs& args) {
  const DecodeKind kind = kind_of(args);
  const DecodeShape& shape = kind.shape;
  DecodeCall call = call_of(args, shape);
  const int64_t rows = args.batch() * args.heads() * args.q_length(), slots = call.splits > 1 ? rows * call.splits : 0;
  const Workspace workspace("decode", args.place, 4 * (slots * (shape.v_groups * 32 + 2) + 4));
  call.partial = static_cast<float*>(workspace.at(0));
  call.largest = call.partial + slots * shape.v_groups * 32, call.total = call.largest + slots;
  call.fault = reinterpret_cast<int32_t*>(call.total + slots);
  if (rows == 0) return;
  const Program& kernels = program(args.place, kind.key(), [&] { return decode_source(kind); });
  if (kind.score || kind.mask) kernels.launch(args.place, "clear_fault", 1, kDecodeThreads, &call);
  kernels.launch(args.place, "decode", args.batch() * args.kv_heads() * call.row_blocks * call.splits, kDecodeThreads,
                 &call, shape.bytes());
  if (call.splits == 1) return;
  program(args.place, {static_cast<int64_t>(SourceKind::decode)}, combine_source)
      .launch(args.place, "combine", rows, kDecodeThreads, &call);
}

// Rows are copied 16 bytes at a time.
bool is_aligned(const TensorView& tensor) { return has_aligned_rows(tensor, 16); }

template <DType kCache>
std::string_view refuses_decode(const DecodeArgs& args) {
  if (args.k.dtype != kCache) return "keys and values of another type";
  if (!fits(args.score_mod) || !fits(args.mask_mod)) return kCapturesTooMuch;
  const int64_t e = args.q.size(3), ev = args.out.size(3);
  if (e > kMaxHeadDim || ev > kMaxHeadDim) return "a head dimension above 256";
  if (args.format() == KvFormat::floating) {
    if (args.q.dtype != kCache) return "q has another dtype than keys and values";
    if (e % 8 || ev % 8) return "head dimensions of 16-bit floats must be multiples of 8";
  }
  if (!is_aligned(args.k) || !is_aligned(args.v)) return "rows of k and v must begin at multiples of 16 bytes";
  if (args.batch() * args.heads() * args.q_length() >= INT32_MAX) return "more than 2^31 rows";
  return "";
}

// One CTA per tile of queries, as in attention, leaves most of a GPU idle with one query: 32 heads occupy 32 of the 132
// multiprocessors of an H100, and each reads all keys of its head.
DecodeArgs decode_args(const AttentionForwardArgs& args) {
  return {.place = args.place, .q = args.q, .k = args.k, .v = args.v, .k_scale = {}, .v_scale = {}, .out = args.out,
          .lse = args.lse, .mask = args.mask, .sink = args.sink, .scale = args.scale, .causal = args.causal,
          .score_mod = args.score_mod, .mask_mod = args.mask_mod};
}
void run_attention(const AttentionForwardArgs& args) { run_decode(decode_args(args)); }

template <DType kDtype>
std::string_view refuses_attention(const AttentionForwardArgs& args) {
  if (args.group() * args.q_length() > 32) return "more than 32 queries of a head of keys";
  if (args.kv_length() <= 2 * kMinSplit) return "256 keys or less, which are not worth a split";
  if (args.dropout_p > 0) return "dropout";
  if (args.cu_seqlens) return kPackedSequences;
  if (args.lists.kv_num_blocks) return "a block mask";
  if (args.max_scores) return "largest scores are wanted";
  return refuses_decode<kDtype>(decode_args(args));
}

constexpr Kernel<DecodeArgs> kDecode[] = {
    {"decode_int8_cuda", refuses_decode<DType::int8>, run_decode},
    {"decode_int4_cuda", refuses_decode<DType::uint8>, run_decode},
    {"decode_bfloat16_cuda", refuses_decode<DType::bfloat16>, run_decode},
    {"decode_float16_cuda", refuses_decode<DType::float16>, run_decode},
};
constexpr Kernel<AttentionForwardArgs> kAttention[] = {
    {"attention_forward_decode_bfloat16_cuda", refuses_attention<DType::bfloat16>, run_attention},
    {"attention_forward_decode_float16_cuda", refuses_attention<DType::float16>, run_attention},
};

}  // namespace

void add_decode_rows(Backend& backend) {
  add_rows(backend, kDecode, std::size(kDecode)), add_rows(backend, kAttention, std::size(kAttention));
}

}  // namespace lowbit::cuda
