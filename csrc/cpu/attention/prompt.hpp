// SPDX-License-Identifier: Apache-2.0
// A prompt over a quantized cache: many queries over codes, a call of the op decode, with the tiles of the forward,
// which dequantize as they pack.
#pragma once

#include "cpu/attention/call.hpp"
#include "ops/decode.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// Above these, tiles of packed keys are faster than products with codes; but each head packs its keys for its own
// queries alone.
constexpr int64_t kDecodeRows = 64, kDecodeQueries = 16;

LOWBIT_INLINE bool is_prompt(const DecodeArgs& args) {
  return args.q_length() > kDecodeQueries && args.q_length() * args.group() > kDecodeRows && !args.score_mod &&
         !args.mask_mod && args.format() != KvFormat::floating;
}

// Tokens from `begin` on of a tensor [B, H, S, ..], or of a mask [.., S].
LOWBIT_INLINE TensorView tokens_of(TensorView tensor, int dim, int64_t begin, int64_t count) {
  if (!tensor) return tensor;
  const int64_t size = static_cast<int64_t>(size_of(tensor.dtype));
  tensor.data = tensor.as<char>() + begin * tensor.stride[dim] * size, tensor.shape[dim] = count;
  return tensor;
}

// The same call for the forward, over the tokens that some query sees.
LOWBIT_INLINE ForwardCall prompt_call(const DecodeArgs& args) {
  const auto clamped = [&](int64_t token) {
    return token < 0 ? 0 : token < args.kv_length() ? token : args.kv_length();
  };
  const int64_t begin = args.window > 0 ? clamped(args.position - args.window + 1) : 0,
                end = args.causal ? clamped(args.position + args.q_length()) : args.kv_length(),
                count = end > begin ? end - begin : 0;
  ForwardCall forward{{.place = args.place,
                       .q = args.q,
                       .k = tokens_of(args.k, 2, begin, count),
                       .v = tokens_of(args.v, 2, begin, count),
                       .out = args.out,
                       .lse = args.lse,
                       .mask = tokens_of(args.mask, 3, begin, count),
                       .sink = args.sink,
                       .scale = args.scale,
                       .causal = args.causal}};
  forward.k_scale = tokens_of(args.k_scale, 2, begin, count);
  forward.v_scale = tokens_of(args.v_scale, 2, begin, count);
  forward.rotated = args.rotated, forward.position = args.position - begin, forward.window = args.window;
  return forward;
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
