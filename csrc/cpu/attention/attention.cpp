// SPDX-License-Identifier: Apache-2.0
// The rows of the ops attention_forward and attention_backward, compiled once per instruction set.
#include LOWBIT_ISA_HEADER

#include "cpu/attention/forward.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

template <class T>
std::string_view refuses(const AttentionForwardArgs& args) {
  return (args.q.dtype == DType::float64) == (sizeof(T) == 8) ? "" : sizeof(T) == 8 ? "for float64 inputs" : "inputs are float64";
}
template <class T>
std::string_view refuses_backward(const AttentionBackwardArgs& args) { return refuses<T>(args.forward); }

#define LOWBIT_STRING_OF(name) #name
#define LOWBIT_STRING(name) LOWBIT_STRING_OF(name)
#define LOWBIT_ROW(what) "attention_" what "_" LOWBIT_STRING(LOWBIT_ISA_NAME)

[[maybe_unused]] constexpr Kernel<AttentionForwardArgs> kForward[] = {
    {LOWBIT_ROW("forward_float32"), refuses<float>, attention_forward<float>},
    {LOWBIT_ROW("forward_float64"), refuses<double>, attention_forward<double>},
};

}  // namespace

std::span<const Kernel<AttentionForwardArgs>> attention_forward_rows() { return kForward; }
std::span<const Kernel<AttentionBackwardArgs>> attention_backward_rows() { return {}; }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
