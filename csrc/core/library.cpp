// SPDX-License-Identifier: Apache-2.0
#include "core/library.hpp"

#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "core/os.hpp"

namespace lowbit {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> folders_of_packages;

std::vector<std::string> split(std::string_view text, char at) {
  std::vector<std::string> parts;
  std::istringstream in{std::string(text)};
  for (std::string part; std::getline(in, part, at);)
    if (!part.empty()) parts.push_back(part);
  return parts;
}

std::string path_of(void* handle, const std::string& opened_as) {
  const std::string path = os::path_of_library(handle);
  return path.empty() ? opened_as : path;
}

// Opens the first file that loads; `missing` gets the reason for a file that exists and does not.
void open_in(const std::vector<std::string>& folders, const LibrarySearch& search, Library& library) {
  std::error_code ignored;
  for (const std::string& name : split(search.names, ' '))
    for (const std::string& folder : folders) {
      const std::string path = folder + "/" + name;
      if (library.handle || !fs::exists(path, ignored)) continue;
      if (search.open_companions) search.open_companions(folder, name);
      library.handle = os::open_library(path.c_str());
      if (library.handle) library.path = path_of(library.handle, path);
      else library.missing += concat(path, " cannot be loaded: ", os::why_not_opened(), "; ");
    }
}

void open_by_name(void* (*open)(const char*), const LibrarySearch& search, Library& library) {
  for (const std::string& name : split(search.names, ' ')) {
    if (library.handle) return;
    library.handle = open(name.c_str());
    if (!library.handle) continue;
    library.path = path_of(library.handle, name);
    if (search.open_companions) search.open_companions(fs::path(library.path).parent_path().string(), name);
  }
}

}  // namespace

std::vector<std::string> folders_of(const char* variable, std::string_view below) {
  std::vector<std::string> folders;
  if (const char* value = std::getenv(variable))
    for (const std::string& folder : split(value, os::kBetweenPaths)) folders.push_back(concat(folder, below));
  return folders;
}

void look_in(std::vector<std::string> site_packages) { folders_of_packages = std::move(site_packages); }
const std::vector<std::string>& site_packages() { return folders_of_packages; }

Library open_library(const LibrarySearch& search) {
  Library library;
  open_in(search.own, search, library);
  open_by_name(os::loaded_library, search, library);
  open_in(search.packages, search, library);
  open_in(search.home, search, library);
  open_by_name([](const char* name) { return os::open_library(name); }, search, library);
  if (library.handle) {
    library.missing.clear();
    return library;
  }
  std::string looked;
  for (const auto* folders : {&search.own, &search.packages, &search.home})
    for (const std::string& folder : *folders) looked += folder + ", ";
  const std::string folders = looked.empty() ? "" : concat("in ", looked, "nor ");
  library.missing += concat(split(search.names, ' ')[0], " was not found ", folders, "where the system looks (",
                            search.source, ")");
  return library;
}

void* Library::symbol(const char* name) const {
  check(handle != nullptr, ErrorKind::runtime, missing);
  void* const address = os::find_symbol(handle, name);
  check(address != nullptr, ErrorKind::runtime, path, " has no ", name, ": it is too old");
  return address;
}

}  // namespace lowbit
