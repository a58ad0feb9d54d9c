// SPDX-License-Identifier: Apache-2.0
// Rows of the ops attention_forward and attention_backward for float64 inputs. They are for gradient checks, so one
// instruction set serves all machines.
#include LOWBIT_ISA_HEADER

#include "cpu/attention/backward.hpp"
#include "cpu/attention/forward.hpp"
#include "cpu/attention/in_memory.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

std::string_view refuses(const AttentionForwardArgs& args) {
  return args.q.dtype == DType::float64 ? "" : "for float64 inputs";
}
std::string_view refuses_backward(const AttentionBackwardArgs& args) { return refuses(args.forward); }

void run_forward(const AttentionForwardArgs& args) { with_memory(args, attention_forward<double>); }
void run_backward(const AttentionBackwardArgs& args) { with_memory(args, attention_backward<BackwardTile<double>>); }

constexpr Kernel<AttentionForwardArgs> kForward[] = {{LOWBIT_ROW("attention_forward_float64"), refuses, run_forward}};
constexpr Kernel<AttentionBackwardArgs> kBackward[] = {
    {LOWBIT_ROW("attention_backward_float64"), refuses_backward, run_backward}};

}  // namespace

void attention_float64_rows(Backend& backend) { add(backend, kForward), add(backend, kBackward); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
