// SPDX-License-Identifier: Apache-2.0
// Rows of the ops attention_forward, attention_backward and decode (prompts) with bfloat16 products on vectors.
#include LOWBIT_ISA_HEADER

#include "cpu/attention/amx_backward.hpp"
#include "cpu/attention/amx_forward.hpp"
#include "cpu/attention/in_memory.hpp"
#include "cpu/attention/prompt.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

std::string_view refuses_below(const AttentionForwardArgs& args, int64_t queries) {
  if (args.q.dtype != DType::bfloat16) return "inputs of another dtype";
  if (args.q_length() < queries) return "so few queries that FMAs of float32 are as fast";
  return args.kv_length() < kStep ? "so few keys that FMAs of float32 are as fast" : "";
}
// 32 x 32 x 64 took 1.6 times as long as float32, 64 x 64 x 64 0.6 times (Zen 4).
std::string_view refuses(const AttentionForwardArgs& args) { return refuses_below(args, 2 * kTileRows + 1); }
std::string_view refuses_backward(const AttentionBackwardArgs& args) { return refuses(args.forward); }
std::string_view refuses_prompt(const DecodeArgs& args) {
  return is_prompt(args) ? refuses_below(prompt_call(args), kTileRows + 1) : "no prompt over codes";
}

void run_forward(const AttentionForwardArgs& args) { with_memory(args, attention_forward_amx<1>); }
void run_backward(const AttentionBackwardArgs& args) { with_memory(args, attention_backward<AmxBackwardTile<1>>); }
void run_prompt(const DecodeArgs& args) { with_memory(prompt_call(args), attention_forward_amx<1>); }

constexpr Kernel<AttentionForwardArgs> kForward[] = {
    {LOWBIT_ROW("attention_forward_bfloat16"), refuses, run_forward}};
constexpr Kernel<AttentionBackwardArgs> kBackward[] = {
    {LOWBIT_ROW("attention_backward_bfloat16"), refuses_backward, run_backward}};
constexpr Kernel<DecodeArgs> kPrompt[] = {{LOWBIT_ROW("decode_prompt_bfloat16"), refuses_prompt, run_prompt}};

}  // namespace

void attention_bf16_rows(Backend& backend) { add(backend, kForward), add(backend, kBackward), add(backend, kPrompt); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
