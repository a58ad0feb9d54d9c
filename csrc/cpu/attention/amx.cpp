// SPDX-License-Identifier: Apache-2.0
// Rows of the ops attention_forward, attention_backward and decode (prompts) on the tile unit.
#include LOWBIT_ISA_HEADER

#include "cpu/attention/amx_backward.hpp"
#include "cpu/attention/amx_forward.hpp"
#include "cpu/attention/in_memory.hpp"
#include "cpu/attention/prompt.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

struct MinSize {
  int64_t queries, keys;
};
constexpr MinSize kMinSize{kTileRows + 1, kStep};  // below, vectors are as fast
// float16 takes three or four products for one, and wins later: 17 x 1024 x 128 took 1.4 times as long, 128 x 128 x 64
// 1.2 times (Sapphire Rapids).
template <int kParts>
constexpr MinSize kMinScores = kParts == 1 ? kMinSize : MinSize{2 * kTileRows, 8 * kStep};

// Rows for bfloat16, which is its own single part, and for float16, which is the sum of two.
template <int kParts>
std::string_view refuses_below(const AttentionForwardArgs& args, MinSize min) {
  if (args.q.dtype != (kParts == 1 ? DType::bfloat16 : DType::float16)) return "inputs of another dtype";
  if (args.q_length() < min.queries) return "so few queries that vectors are as fast";
  return args.kv_length() < min.keys ? "so few keys that vectors are as fast" : "";
}
template <int kParts>
std::string_view refuses(const AttentionForwardArgs& args) {
  return refuses_below<kParts>(args, kMinScores<kParts>);
}
template <int kParts>
std::string_view refuses_backward(const AttentionBackwardArgs& args) {
  return refuses<kParts>(args.forward);
}
template <int kParts>
std::string_view refuses_prompt(const DecodeArgs& args) {
  return is_prompt(args) ? refuses_below<kParts>(prompt_call(args), kMinSize) : "no prompt over codes";
}

template <int kParts>
void run_forward(const AttentionForwardArgs& args) {
  with_memory(args, attention_forward_amx<kParts>);
}
template <int kParts>
void run_backward(const AttentionBackwardArgs& args) {
  with_memory(args, attention_backward<AmxBackwardTile<kParts>>);
}
template <int kParts>
void run_prompt(const DecodeArgs& args) {
  with_memory(prompt_call(args), attention_forward_amx<kParts>);
}

constexpr Kernel<AttentionForwardArgs> kForward[] = {
    {LOWBIT_ROW("attention_forward_bfloat16"), refuses<1>, run_forward<1>},
    {LOWBIT_ROW("attention_forward_float16"), refuses<2>, run_forward<2>}};
constexpr Kernel<AttentionBackwardArgs> kBackward[] = {
    {LOWBIT_ROW("attention_backward_bfloat16"), refuses_backward<1>, run_backward<1>},
    {LOWBIT_ROW("attention_backward_float16"), refuses_backward<2>, run_backward<2>}};
constexpr Kernel<DecodeArgs> kPrompt[] = {
    {LOWBIT_ROW("decode_prompt_bfloat16"), refuses_prompt<1>, run_prompt<1>},
    {LOWBIT_ROW("decode_prompt_float16"), refuses_prompt<2>, run_prompt<2>}};

}  // namespace

void attention_amx_rows(Backend& backend) { add(backend, kForward), add(backend, kBackward), add(backend, kPrompt); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
