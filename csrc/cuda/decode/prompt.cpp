// SPDX-License-Identifier: Apache-2.0
// Rows of the op decode for a prompt, with the tiles of attention: the kernel for few queries would read the cache once
// per 8 or 16 rows of a kv head. From a cache of codes, the keys and values that some query sees are first decoded to
// the queries' 16 bits, with their rotation undone; floats are read in place.
#include "cuda/decode/prompt.hpp"

#include "cuda/attention/forward.hpp"
#include "cuda/attention/kind.hpp"
#include "cuda/backend.hpp"
#include "cuda/decode/call.hpp"
#include "cuda/decode/convert.hpp"
#include "score/program.hpp"

namespace lowbit::cuda {

// 64 heads of 32k keys of 128 columns: more would not fill a GPU better.
int64_t max_decoded_bytes = int64_t{1} << 30;

namespace {

// A tile of attention has 64 or 128 queries of one head. With fewer queries, as in speculative decoding, it is mostly
// empty, and the codes are read only a few times.
constexpr int64_t kMaxPerStep = 64;
constexpr int64_t kFarthest = int64_t{1} << 30;  // tiles have 32-bit indices

// Rows [B, Hkv, keys, columns] of floats, head after head. There may be memory for only some heads,
// from `first_head` on.
TensorView decoded_rows(const DecodeArgs& args, int64_t keys, int64_t columns, void* memory, int64_t first_head) {
  const int64_t of_head = keys * columns;
  TensorView rows{.data = static_cast<uint16_t*>(memory) - first_head * of_head, .dtype = args.q.dtype,
                  .device = args.q.device, .rank = 4};
  rows.shape = {args.batch(), args.kv_heads(), keys, columns};
  rows.stride = {args.kv_heads() * of_head, of_head, columns, 1};
  return rows;
}

AttentionForwardArgs forward_args(const DecodeArgs& args, const TensorView& k, const TensorView& v) {
  return {.place = args.place, .q = args.q, .k = k, .v = v, .out = args.out, .lse = args.lse, .mask = args.mask,
          .sink = args.sink, .scale = args.scale, .causal = args.causal, .score_mod = args.score_mod,
          .mask_mod = args.mask_mod};
}

// The same with keys renumbered by -first; those with negative numbers do not exist.
TensorView numbered_from(TensorView rows, int64_t first) {
  rows.data = static_cast<char*>(rows.data) - first * rows.stride[2] * static_cast<int64_t>(size_of(rows.dtype));
  rows.shape[2] += first;
  return rows;
}

ForwardPart part_of(const DecodeArgs& args, int64_t first_kv_head, int64_t kv_heads) {
  return {.position = args.position, .window = smaller(args.window, kFarthest),
          .first_head = first_kv_head * args.group(), .heads = kv_heads * args.group()};
}

void run_floats(const DecodeArgs& args) {
  run_prompt(forward_args(args, args.k, args.v), part_of(args, 0, args.batch() * args.kv_heads()));
}

void run_codes(const DecodeArgs& args) {
  const auto rows_of = [&](int64_t keys, int64_t columns, void* memory, int64_t first_head) {
    return decoded_rows(args, keys, columns, memory, first_head);
  };
  const int64_t e = args.q.size(3), ev = args.out.size(3);
  const KeyRange seen = DecodeCall{.causal = args.causal, .position = args.position, .window = args.window}.seen(
      args.kv_length(), 0, args.q_length() - 1);
  const int64_t tile = kind_of(forward_args(args, args.k, args.v)).forward().kv_tile,
                first_key = seen.first / tile * tile, keys = seen.end - first_key;  // tiles are read whole
  const int64_t all = args.batch() * args.kv_heads(), bytes = 2 * keys * (e + ev),
                most = larger(1, smaller(all, max_decoded_bytes / larger(1, bytes)));
  const Workspace workspace("decode", args.place, most * bytes);
  for (int64_t first = 0; first < all; first += most) {
    const int64_t heads = smaller(most, all - first);
    const TensorView k = rows_of(keys, e, workspace.at(0), first),
                     v = rows_of(keys, ev, workspace.at(2 * most * keys * e), first);
    const auto dequantize = [&](const TensorView& codes, const TensorView& scale, const TensorView& x, bool rotated) {
      run_dequantize({.place = args.place, .codes = numbered_from(codes, -first_key),
                      .scale = numbered_from(scale, -first_key), .x = x, .rotated = rotated}, first, heads);
    };
    dequantize(args.k, args.k_scale, k, args.rotated), dequantize(args.v, args.v_scale, v, false);
    run_prompt(forward_args(args, numbered_from(k, first_key), numbered_from(v, first_key)),
                part_of(args, first, heads));
  }
}

template <DType kCache>
std::string_view refuses_prompt(const DecodeArgs& args) {
  if (args.k.dtype != kCache) return "keys and values of another type";
  if (args.q_length() <= kMaxPerStep) return "64 queries or less";
  if (larger(args.kv_length(), args.position + args.q_length()) > kFarthest || args.position < -kFarthest)
    return "keys or positions beyond 2^30";
  if ((args.causal || args.window > 0) && (gathers(args.score_mod, Stage::row) || gathers(args.mask_mod, Stage::row)))
    return "a mod that gathers by query or key, which tiles ask about keys that causality or the window hides too";
  if (args.format() == KvFormat::floating)
    return args.q.dtype == kCache ? refuses_forward(forward_args(args, args.k, args.v))
                                  : "q has another dtype than keys and values";
  const auto of = [&](int64_t columns) { return decoded_rows(args, args.kv_length(), columns, nullptr, 0); };
  return refuses_forward(forward_args(args, of(args.q.size(3)), of(args.out.size(3))));
}

constexpr Kernel<DecodeArgs> kPrompt[] = {
    {"decode_prompt_int8_cuda", refuses_prompt<DType::int8>, run_codes},
    {"decode_prompt_int4_cuda", refuses_prompt<DType::uint8>, run_codes},
    {"decode_prompt_bfloat16_cuda", refuses_prompt<DType::bfloat16>, run_floats},
    {"decode_prompt_float16_cuda", refuses_prompt<DType::float16>, run_floats},
};

}  // namespace

void add_prompt_rows(Backend& backend) { add_rows(backend, kPrompt, std::size(kPrompt)); }

}  // namespace lowbit::cuda
