// SPDX-License-Identifier: Apache-2.0
// Rows of the ops attention_forward, attention_backward and decode (prompts) by the tile unit.
#include LOWBIT_ISA_HEADER

#include "cpu/attention/amx_backward.hpp"
#include "cpu/attention/amx_forward.hpp"
#include "cpu/attention/in_memory.hpp"
#include "cpu/attention/prompt.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// Rows of bfloat16, which is its own part, and of float16, which is the sum of two.
template <int kParts>
std::string_view refuses(const AttentionForwardArgs& args) {
  if (args.q.dtype != (kParts == 1 ? DType::bfloat16 : DType::float16)) return "inputs of another dtype";
  if (args.q_length() <= kTileRows) return "no more queries than a tile has rows: vectors are as fast";
  return args.kv_length() < kStep ? "fewer than 32 keys: vectors are as fast" : "";
}
template <int kParts>
std::string_view refuses_backward(const AttentionBackwardArgs& args) {
  return refuses<kParts>(args.forward);
}
template <int kParts>
std::string_view refuses_prompt(const DecodeArgs& args) {
  return is_prompt(args) ? refuses<kParts>(prompt_args(args)) : "no prompt over codes";
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
  run_forward<kParts>(prompt_args(args));
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
