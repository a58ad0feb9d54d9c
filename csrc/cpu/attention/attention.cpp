// SPDX-License-Identifier: Apache-2.0
// Rows of the ops attention_forward and attention_backward in float32 arithmetic, and of decode for prompts.
#include LOWBIT_ISA_HEADER

#include "cpu/attention/backward.hpp"
#include "cpu/attention/forward.hpp"
#include "cpu/attention/in_memory.hpp"
#include "cpu/attention/prompt.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr std::string_view kFloat64 = "inputs are float64";
std::string_view refuses(const AttentionForwardArgs& args) { return args.q.dtype == DType::float64 ? kFloat64 : ""; }
std::string_view refuses_backward(const AttentionBackwardArgs& args) { return refuses(args.forward); }

void run_forward(const AttentionForwardArgs& args) { with_memory(args, attention_forward<float>); }
void run_backward(const AttentionBackwardArgs& args) { with_memory(args, attention_backward<BackwardTile<float>>); }

std::string_view refuses_prompt(const DecodeArgs& args) { return is_prompt(args) ? "" : "no prompt over codes"; }
void run_prompt(const DecodeArgs& args) { with_memory(prompt_call(args), attention_forward<float>); }

constexpr Kernel<AttentionForwardArgs> kForward[] = {{LOWBIT_ROW("attention_forward_float32"), refuses, run_forward}};
constexpr Kernel<AttentionBackwardArgs> kBackward[] = {
    {LOWBIT_ROW("attention_backward_float32"), refuses_backward, run_backward}};
constexpr Kernel<DecodeArgs> kPrompt[] = {{LOWBIT_ROW("decode_prompt_float32"), refuses_prompt, run_prompt}};

}  // namespace

void attention_attention_rows(Backend& backend) {
  add(backend, kForward), add(backend, kBackward), add(backend, kPrompt);
}

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
