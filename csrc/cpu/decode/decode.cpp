// SPDX-License-Identifier: Apache-2.0
// The rows of the ops decode, kv_quantize and kv_dequantize, compiled once per instruction set.
#include LOWBIT_ISA_HEADER

#ifdef LOWBIT_HAS_VNNI  // VNNI adds integer products only
#include "cpu/decode/split.hpp"
#else
#include "cpu/decode/quantize.hpp"
#endif

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

template <DType kDType>
std::string_view refuses(const DecodeArgs& args) { return args.k.dtype == kDType ? "" : "keys and values of another type"; }

template <class Args>
std::string_view never_refuses(const Args&) { return ""; }

#define LOWBIT_STRING_OF(name) #name
#define LOWBIT_STRING(name) LOWBIT_STRING_OF(name)
#define LOWBIT_ISA_SUFFIX "_" LOWBIT_STRING(LOWBIT_ISA_NAME)

constexpr Kernel<DecodeArgs> kRows[] = {
    {"decode_int8" LOWBIT_ISA_SUFFIX, refuses<DType::int8>, decode_call<CodeKv<KvFormat::int8>>},
    {"decode_int4" LOWBIT_ISA_SUFFIX, refuses<DType::uint8>, decode_call<CodeKv<KvFormat::int4>>},
#ifndef LOWBIT_HAS_VNNI
    {"decode_float32" LOWBIT_ISA_SUFFIX, refuses<DType::float32>, decode_call<FloatKv<float>>},
    {"decode_bfloat16" LOWBIT_ISA_SUFFIX, refuses<DType::bfloat16>, decode_call<FloatKv<bfloat16_bits>>},
    {"decode_float16" LOWBIT_ISA_SUFFIX, refuses<DType::float16>, decode_call<FloatKv<float16_bits>>},
#endif
};

#ifndef LOWBIT_HAS_VNNI
constexpr Kernel<KvQuantizeArgs> kQuantizeRows[] = {{"kv_quantize" LOWBIT_ISA_SUFFIX, never_refuses<KvQuantizeArgs>, kv_quantize_rows_of}};
constexpr Kernel<KvDequantizeArgs> kDequantizeRows[] = {{"kv_dequantize" LOWBIT_ISA_SUFFIX, never_refuses<KvDequantizeArgs>, kv_dequantize_rows_of}};
#endif

}  // namespace

std::span<const Kernel<DecodeArgs>> decode_rows() { return kRows; }
#ifndef LOWBIT_HAS_VNNI
std::span<const Kernel<KvQuantizeArgs>> kv_quantize_rows() { return kQuantizeRows; }
std::span<const Kernel<KvDequantizeArgs>> kv_dequantize_rows() { return kDequantizeRows; }
#else
std::span<const Kernel<KvQuantizeArgs>> kv_quantize_rows() { return {}; }
std::span<const Kernel<KvDequantizeArgs>> kv_dequantize_rows() { return {}; }
#endif

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
