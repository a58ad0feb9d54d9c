// SPDX-License-Identifier: Apache-2.0
// Rows of the op decode for keys and values stored as codes.
#include LOWBIT_ISA_HEADER

#include "cpu/attention/prompt.hpp"
#include "cpu/decode/codes.hpp"
#include "cpu/decode/split.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

template <DType kDType>
std::string_view refuses_codes(const DecodeArgs& args) {
  return is_prompt(args) ? "a prompt: tiles of the forward are faster" : refuses<kDType>(args);
}

constexpr Kernel<DecodeArgs> kRows[] = {
    {LOWBIT_ROW("decode_int8"), refuses_codes<DType::int8>, run<CodeKv<KvFormat::int8>>},
    {LOWBIT_ROW("decode_int4"), refuses_codes<DType::uint8>, run<CodeKv<KvFormat::int4>>},
};

}  // namespace

void decode_codes_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
