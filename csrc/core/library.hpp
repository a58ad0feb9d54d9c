// SPDX-License-Identifier: Apache-2.0
// Libraries of others, opened when first needed: none of them is linked, and a machine without one never looks.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/error.hpp"

namespace lowbit {

struct Library {
  void* handle = nullptr;
  std::string path = {};     // of the file, once open
  std::string missing = {};  // where it was looked for, and what installs it

  // The address of a function, or an Error that names it.
  void* symbol(const char* name) const;
};

// The order of the search: folders that the user names; libraries that are loaded; folders of Python packages; the home
// that a variable of the library's own names; the system's folders.
struct LibrarySearch {
  std::string_view names;   // of the file, the best first, with spaces between them
  std::string_view source;  // what installs it
  std::vector<std::string> own, packages, home;
  // Opens the files that the library itself opens by name: called before use, with the folder that it lies in.
  void (*open_companions)(const std::string& folder, std::string_view name) = nullptr;
};
Library open_library(const LibrarySearch& search);

// The folders that a variable of the environment lists, with colons between them, each with `below` behind it.
std::vector<std::string> folders_of(const char* variable, std::string_view below);

// Folders of Python packages; told before the first library is opened.
LOWBIT_API void look_in(std::vector<std::string> site_packages);
const std::vector<std::string>& site_packages();

// For a list of functions, X(name, symbol, parameters ...): members of a struct that points to them, and its
// initialisers from the library `found`. All return 0 for success.
#define LOWBIT_FUNCTION_MEMBER(name, symbol_name, ...) int (*name)(__VA_ARGS__);
#define LOWBIT_FUNCTION_FOUND(name, symbol_name, ...) \
  .name = reinterpret_cast<int (*)(__VA_ARGS__)>(found.symbol(symbol_name)),

}  // namespace lowbit
