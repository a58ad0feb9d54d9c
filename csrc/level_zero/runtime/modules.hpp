// SPDX-License-Identifier: Apache-2.0
// The modules that are in the library: the files of csrc/level_zero/spirv.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace lowbit::level_zero {

std::span<const uint32_t> module_words(std::string_view name);  // RuntimeError: none has that name

}  // namespace lowbit::level_zero
