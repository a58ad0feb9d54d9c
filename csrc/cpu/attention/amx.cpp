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

std::string_view refuses(const AttentionForwardArgs& args) {
  if (args.q.dtype != DType::bfloat16) return "inputs are not bfloat16";
  if (args.q_length() <= kTileRows) return "no more queries than a tile has rows: vectors are as fast";
  return args.kv_length() < kStep ? "fewer than 32 keys: vectors are as fast" : "";
}

std::string_view refuses_backward(const AttentionBackwardArgs& args) { return refuses(args.forward); }

void run_forward(const AttentionForwardArgs& args) { with_memory(args, attention_forward_amx<1>); }
void run_backward(const AttentionBackwardArgs& args) { with_memory(args, attention_backward<AmxBackwardTile>); }

std::string_view refuses_prompt(const DecodeArgs& args) {
  return is_prompt(args) ? refuses(prompt_args(args)) : "no prompt over codes";
}
void run_prompt(const DecodeArgs& args) { run_forward(prompt_args(args)); }

constexpr Kernel<AttentionForwardArgs> kForward[] = {{LOWBIT_ROW("attention_forward_bfloat16"), refuses, run_forward}};
constexpr Kernel<AttentionBackwardArgs> kBackward[] = {
    {LOWBIT_ROW("attention_backward_bfloat16"), refuses_backward, run_backward}};
constexpr Kernel<DecodeArgs> kPrompt[] = {{LOWBIT_ROW("decode_prompt_bfloat16"), refuses_prompt, run_prompt}};

}  // namespace

void attention_amx_rows(Backend& backend) { add(backend, kForward), add(backend, kBackward), add(backend, kPrompt); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
