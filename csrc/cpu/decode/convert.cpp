// SPDX-License-Identifier: Apache-2.0
// Rows of the ops kv_quantize and kv_dequantize.
#include LOWBIT_ISA_HEADER

#include "cpu/decode/convert.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr Kernel<KvQuantizeArgs> kQuantizeRows[] = {
    {LOWBIT_ROW("kv_quantize"), never_refuses<KvQuantizeArgs>, kv_quantize_rows_of}};
constexpr Kernel<KvDequantizeArgs> kDequantizeRows[] = {
    {LOWBIT_ROW("kv_dequantize"), never_refuses<KvDequantizeArgs>, kv_dequantize_rows_of}};

}  // namespace

void decode_convert_rows(Backend& backend) { add(backend, kQuantizeRows), add(backend, kDequantizeRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
