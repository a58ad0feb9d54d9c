// SPDX-License-Identifier: Apache-2.0
// The one exception type. `kind` decides the Python exception; the text says op, argument, got, wanted.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

// What bindings and C++ programs may call: the shared library hides everything else.
#define LOWBIT_API __attribute__((visibility("default")))

namespace lowbit {

enum class LOWBIT_API ErrorKind { value, type, index, not_implemented, runtime };

class LOWBIT_API Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind(kind) {}
  ErrorKind kind;
};

template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <class... Parts>
void check(bool condition, ErrorKind kind, const Parts&... parts) {
  if (!condition) [[unlikely]] throw Error(kind, concat(parts...));
}

}  // namespace lowbit
