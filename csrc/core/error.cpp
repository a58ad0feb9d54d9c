// SPDX-License-Identifier: Apache-2.0
#include "core/error.hpp"

namespace lowbit {

std::string join(std::initializer_list<Part> parts) {
  std::ostringstream out;
  for (const Part& part : parts) {
    if (part.print_) part.print_(out, part.value_);
    else out << std::string_view(static_cast<const char*>(part.value_), part.bytes_);
  }
  return std::move(out).str();
}

void fail(ErrorKind kind, std::initializer_list<Part> parts) { throw Error(kind, join(parts)); }

}  // namespace lowbit
