// SPDX-License-Identifier: Apache-2.0
// Third-party libraries, opened on first use. None is linked, and a machine without them never looks for one.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/error.hpp"

namespace lowbit {

struct Library {
  void* handle = nullptr;
  std::string path = {};     // path of the file, once open
  std::string missing = {};  // where it was looked for, and what installs it

  // The address of a function, or an Error that names it.
  void* symbol(const char* name) const;
};

// The search order: folders named by the user; libraries already loaded; folders of Python packages; the home folder
// named by one of the library's own variables; the system's folders.
struct LibrarySearch {
  std::string_view names;   // names of the file, best first, separated by spaces
  std::string_view source;  // what installs it
  std::vector<std::string> own, packages, home;
  // Opens the files that the library opens by name. Called before use, with the library's folder.
  void (*open_companions)(const std::string& folder, std::string_view name) = nullptr;
};
Library open_library(const LibrarySearch& search);

// The folders listed in an environment variable, separated as the system separates paths, each with `below` appended.
std::vector<std::string> folders_of(const char* variable, std::string_view below);

// Sets the folders of Python packages, before the first library is opened.
LOWBIT_API void look_in(std::vector<std::string> site_packages);
const std::vector<std::string>& site_packages();

// For a list of functions, X(name, symbol, parameters ...): struct members that point to them, and their initialisers
// from the library `found`. Each returns 0 on success.
#define LOWBIT_FUNCTION_MEMBER(name, symbol_name, ...) int (*name)(__VA_ARGS__);
#define LOWBIT_FUNCTION_FOUND(name, symbol_name, ...) \
  .name = reinterpret_cast<int (*)(__VA_ARGS__)>(found.symbol(symbol_name)),

}  // namespace lowbit
