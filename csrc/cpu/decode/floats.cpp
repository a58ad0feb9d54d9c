// SPDX-License-Identifier: Apache-2.0
// Rows of the op decode for float keys and values, and of attention_forward for few queries over many keys, where these
// loops are faster.
#include LOWBIT_ISA_HEADER

#include "cpu/decode/floats.hpp"
#include "cpu/decode/split.hpp"
#include "cpu/rows.hpp"
#include "ops/attention.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr Kernel<DecodeArgs> kRows[] = {
    {LOWBIT_ROW("decode_float32"), refuses<DType::float32>, run<FloatKv<float>>},
    {LOWBIT_ROW("decode_bfloat16"), refuses<DType::bfloat16>, run<FloatKv<bfloat16_bits>>},
    {LOWBIT_ROW("decode_float16"), refuses<DType::float16>, run<FloatKv<float16_bits>>},
};

// Rows are queries times the heads of a kv head, and are taken a few at a time. Above kMaxRows the tiles of packed keys of
// cpu/attention are faster, but they pack keys anew for each head: with kFewQueries that costs more, whatever the number
// of heads. 2000 keys of 576 columns (latent attention), 20 heads on AVX2: 7.7 times the time for one query, 4.5 for two
// and 1.6 for eight.
constexpr int64_t kMaxRows = 16, kFewQueries = 4;

template <DType kDType>
std::string_view refuses_attention(const AttentionForwardArgs& args) {
  if (args.q.dtype != kDType) return "keys and values of another type";
  const bool few = args.q_length() <= kFewQueries || args.q_length() * args.group() <= kMaxRows;
  if (!few || args.kv_length() == 0) return "not few queries over some keys";
  if (args.cu_seqlens) return kPackedSequences;
  if (args.max_scores || args.dropout_p != 0 || args.lists.kv_num_blocks)
    return "largest scores, dropout and block masks are not kept by decode";
  return args.out.dtype == kDType && (!args.lse || args.lse.dtype == DType::float32)
             ? ""
             : "the result is wanted in float32";
}

template <class Kv>
void attention_by_decode(const AttentionForwardArgs& args) {
  run<Kv>({.place = args.place,
           .q = args.q,
           .k = args.k,
           .v = args.v,
           .k_scale = {},
           .v_scale = {},
           .out = args.out,
           .lse = args.lse,
           .mask = args.mask,
           .sink = args.sink,
           .scale = args.scale,
           .causal = args.causal,
           .position = 0,
           .window = 0,
           .rotated = false,
           .score_mod = args.score_mod,
           .mask_mod = args.mask_mod});
}

constexpr Kernel<AttentionForwardArgs> kAttentionRows[] = {
    {LOWBIT_ROW("attention_forward_decode_float32"), refuses_attention<DType::float32>,
     attention_by_decode<FloatKv<float>>},
    {LOWBIT_ROW("attention_forward_decode_bfloat16"), refuses_attention<DType::bfloat16>,
     attention_by_decode<FloatKv<bfloat16_bits>>},
    {LOWBIT_ROW("attention_forward_decode_float16"), refuses_attention<DType::float16>,
     attention_by_decode<FloatKv<float16_bits>>},
};

}  // namespace

void decode_floats_rows(Backend& backend) { add(backend, kRows), add(backend, kAttentionRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
