// SPDX-License-Identifier: Apache-2.0
#include "level_zero/runtime/specialise.hpp"

#include <map>

#include "core/error.hpp"

namespace lowbit::level_zero {
namespace {

// Words of SPIR-V 1.2: an instruction begins with its word count and its opcode.
constexpr std::size_t kHeaderWords = 5;
constexpr uint32_t kOpSpecConstant = 50, kOpDecorate = 71, kSpecId = 1;

}  // namespace

std::vector<uint32_t> specialised(std::vector<uint32_t> module, std::span<const int32_t> constants) {
  std::map<uint32_t, uint32_t> numbers;  // specialised id -> number; decorations precede definitions
  for (std::size_t at = kHeaderWords; at < module.size();) {
    const uint32_t count = module[at] >> 16, operation = module[at] & 0xffff;
    check(count > 0 && at + count <= module.size(), ErrorKind::runtime, "level_zero: a module of SPIR-V is cut off");
    const uint32_t* operands = &module[at] + 1;
    if (operation == kOpDecorate && count == 4 && operands[1] == kSpecId) numbers[operands[0]] = operands[2];
    if (operation == kOpSpecConstant && count == 4) {  // operands: type, id, value
      const auto found = numbers.find(operands[1]);
      if (found != numbers.end() && found->second < constants.size())
        module[at + 3] = static_cast<uint32_t>(constants[found->second]);
    }
    at += count;
  }
  return module;
}

}  // namespace lowbit::level_zero
