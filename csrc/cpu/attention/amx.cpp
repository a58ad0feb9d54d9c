// SPDX-License-Identifier: Apache-2.0
// Rows of the op attention_forward by the tile unit.
#include LOWBIT_ISA_HEADER

#include "cpu/attention/amx_forward.hpp"
#include "cpu/attention/in_memory.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

std::string_view refuses(const AttentionForwardArgs& args) {
  if (args.q.dtype != DType::bfloat16) return "inputs are not bfloat16";
  return args.q_length() <= kTileRows ? "no more queries than a tile has rows: vectors are as fast" : "";
}

void run_forward(const AttentionForwardArgs& args) { with_memory(args, attention_forward_amx<1>); }

constexpr Kernel<AttentionForwardArgs> kForward[] = {{LOWBIT_ROW("attention_forward_bfloat16"), refuses, run_forward}};

}  // namespace

void attention_amx_rows(Backend& backend) { add(backend, kForward); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
