// SPDX-License-Identifier: Apache-2.0
#include "score/spirv_tokens.hpp"

#include <algorithm>

namespace lowbit::spirv {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || is_digit(c) || c == '_'; }

constexpr std::string_view kSigns[] = {"<<", ">>", "<=", ">=", "==", "!=", "&&", "||"};  // of two letters

std::size_t length_of(std::string_view text) {
  std::size_t end = 0;
  if (!is_letter(text[0])) return 1 + (std::ranges::find(kSigns, text.substr(0, 2)) != std::end(kSigns));
  const bool number = is_digit(text[0]), hexadecimal = text.starts_with("0x");
  while (end < text.size() && (is_letter(text[end]) || (number && text[end] == '.'))) {
    const bool exponent = number && !hexadecimal && text[end] == 'e' && end + 1 < text.size();
    end += exponent && (text[end + 1] == '-' || text[end + 1] == '+') ? 2 : 1;
  }
  return end;
}

Tokens tokens_of(std::string_view text) {
  Tokens tokens;
  while (true) {
    text.remove_prefix(std::min(text.find_first_not_of(" \n"), text.size()));
    if (text.empty()) return tokens;
    const std::size_t length = length_of(text);
    tokens.push_back({is_digit(text[0])    ? Token::Kind::number
                      : is_letter(text[0]) ? Token::Kind::name
                                           : Token::Kind::sign,
                      text.substr(0, length)});
    text.remove_prefix(length);
  }
}

// From behind an opening parenthesis: the arguments, and `at` behind the closing one.
std::vector<Tokens> arguments_at(const Tokens& from, std::size_t& at) {
  std::vector<Tokens> arguments(1);
  for (int depth = 0;; at++) {
    const std::string_view text = from[at].text;
    if (depth == 0 && text == ")") break;
    if (depth == 0 && text == ",") {
      arguments.emplace_back();
      continue;
    }
    depth += (text == "(") - (text == ")");
    arguments.back().push_back(from[at]);
  }
  at++;
  return arguments;
}

}  // namespace

void Macros::define(std::string_view line) {  // behind "#define "
  const std::size_t name = length_of(line);
  Macro macro{.takes_arguments = name < line.size() && line[name] == '('};
  std::size_t body = name;
  if (macro.takes_arguments) {
    body = line.find(')') + 1;
    for (const Token& token : tokens_of(line.substr(name, body - name)))
      if (token.kind == Token::Kind::name) macro.parameters.push_back(token.text);
  }
  macro.body = tokens_of(line.substr(body));
  macros_[line.substr(0, name)] = std::move(macro);
}

void Macros::expand(const Tokens& from, Tokens& to) const {
  for (std::size_t at = 0; at < from.size();) {
    const Token& token = from[at++];
    const auto found = macros_.find(token.text);
    if (found == macros_.end()) {
      to.push_back(token);
      continue;
    }
    const Macro& macro = found->second;
    std::vector<Tokens> arguments;
    if (macro.takes_arguments) arguments = arguments_at(from, ++at);
    Tokens made;
    for (const Token& word : macro.body) {
      const auto parameter = std::ranges::find(macro.parameters, word.text);
      if (parameter == macro.parameters.end()) {
        made.push_back(word);
      } else {
        const Tokens& argument = arguments[static_cast<std::size_t>(parameter - macro.parameters.begin())];
        made.insert(made.end(), argument.begin(), argument.end());
      }
    }
    expand(made, to);
  }
}

Tokens Macros::read(std::string_view text) {
  Tokens plain, tokens;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    if (line.starts_with("#define ")) define(line.substr(8));
    else if (!line.starts_with("#"))
      for (const Token& token : tokens_of(line)) plain.push_back(token);
    text.remove_prefix(std::min(line.size() + 1, text.size()));
  }
  expand(plain, tokens);
  return tokens;
}

}  // namespace lowbit::spirv
