// SPDX-License-Identifier: Apache-2.0
// The words of a printed program (print.hpp), with every #define of its prelude put in place.
#pragma once

#include <map>
#include <string_view>
#include <vector>

namespace lowbit::spirv {

struct Token {
  enum class Kind : uint8_t { name, number, sign, end } kind = Kind::end;
  std::string_view text;
};
using Tokens = std::vector<Token>;

class Macros {
 public:
  // Of a text, which stays: its lines of #define are kept for the texts after it.
  Tokens read(std::string_view text);

 private:
  struct Macro {
    bool takes_arguments = false;
    std::vector<std::string_view> parameters{};
    Tokens body{};
  };
  void define(std::string_view line);
  void expand(const Tokens& from, Tokens& to) const;
  std::map<std::string_view, Macro> macros_;
};

}  // namespace lowbit::spirv
