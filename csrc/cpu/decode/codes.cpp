// SPDX-License-Identifier: Apache-2.0
// Rows of the op decode over keys and values as codes.
#include LOWBIT_ISA_HEADER

#include "cpu/decode/codes.hpp"
#include "cpu/decode/split.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr Kernel<DecodeArgs> kRows[] = {
    {LOWBIT_ROW("decode_int8"), refuses<DType::int8>, run<CodeKv<KvFormat::int8>>},
    {LOWBIT_ROW("decode_int4"), refuses<DType::uint8>, run<CodeKv<KvFormat::int4>>},
};

}  // namespace

void decode_codes_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
