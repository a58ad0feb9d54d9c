// SPDX-License-Identifier: Apache-2.0
// The rows of the ops attention_forward and attention_backward, compiled once per instruction set.
#include LOWBIT_ISA_HEADER

#include "cpu/attention/backward.hpp"
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

// Float64 is for checking gradients: the row of scalar serves every machine. VNNI adds integer products only: the rows of avx512 serve.
[[maybe_unused]] constexpr Kernel<AttentionForwardArgs> kForward[] = {
    {LOWBIT_ROW("forward_float32"), refuses<float>, attention_forward<float>},
#ifdef LOWBIT_IS_SCALAR
    {LOWBIT_ROW("forward_float64"), refuses<double>, attention_forward<double>},
#endif
};
[[maybe_unused]] constexpr Kernel<AttentionBackwardArgs> kBackward[] = {
    {LOWBIT_ROW("backward_float32"), refuses_backward<float>, attention_backward<float>},
#ifdef LOWBIT_IS_SCALAR
    {LOWBIT_ROW("backward_float64"), refuses_backward<double>, attention_backward<double>},
#endif
};

}  // namespace

#ifdef LOWBIT_HAS_VNNI
std::span<const Kernel<AttentionForwardArgs>> attention_forward_rows() { return {}; }
std::span<const Kernel<AttentionBackwardArgs>> attention_backward_rows() { return {}; }
#else
std::span<const Kernel<AttentionForwardArgs>> attention_forward_rows() { return kForward; }
std::span<const Kernel<AttentionBackwardArgs>> attention_backward_rows() { return kBackward; }
#endif

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
