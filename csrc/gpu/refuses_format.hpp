// SPDX-License-Identifier: Apache-2.0
// Host code that refuses the formats that no GPU kernel reads or writes.
#pragma once

#include <string_view>

#include "formats/list.hpp"

namespace lowbit::gpu {

inline std::string_view refuses_format(Format format) {
  return is_semi_sparse(format) ? "a 2:4 weight, which only CPUs read" : "";
}

}  // namespace lowbit::gpu
