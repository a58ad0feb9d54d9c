// SPDX-License-Identifier: Apache-2.0
// The SPIR-V modules in this library: level_zero/<op>/<module>.spirv.cpp, compiled by tools/spirv during the build.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.hpp"

namespace lowbit::level_zero {

// The words of a module by its name; empty if it does not exist.
LOWBIT_API std::vector<uint32_t> module_words(std::string_view name);
LOWBIT_API std::vector<std::string_view> module_names();
LOWBIT_API std::string_view modules_compiler();  // "clang 15"; "" in a build without modules

// Why this build has no modules, and which builds have them, or "".
LOWBIT_API const std::string& modules_missing();

}  // namespace lowbit::level_zero
