// SPDX-License-Identifier: Apache-2.0
#include "cuda/runtime/library.hpp"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <sstream>

#include "core/once.hpp"

namespace lowbit::cuda {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> site_packages;

std::vector<std::string> split(std::string_view text, char at) {
  std::vector<std::string> parts;
  std::istringstream in{std::string(text)};
  for (std::string part; std::getline(in, part, at);)
    if (!part.empty()) parts.push_back(part);
  return parts;
}

std::vector<std::string> folders_of(const char* variable, const char* below) {
  std::vector<std::string> folders;
  if (const char* value = std::getenv(variable))
    for (const std::string& folder : split(value, ':')) folders.push_back(folder + below);
  return folders;
}

std::vector<std::string> folders_of_packages() {
  std::vector<std::string> folders;
  std::error_code ignored;
  for (const std::string& site : site_packages)
    for (fs::directory_iterator i(fs::path(site) / "nvidia", ignored), end; i != end; i.increment(ignored))
      if (fs::is_directory(i->path() / "lib", ignored)) folders.push_back((i->path() / "lib").string());
  std::sort(folders.begin(), folders.end());
  return folders;
}

std::string path_of(void* handle, const std::string& opened_as) {
  link_map* map = nullptr;
  return dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map->l_name[0] ? map->l_name : opened_as;
}

// The compiler opens libnvrtc-builtins by name, and NVRTC 13.0 has no run path to find it by: it is opened before it is
// wanted.
void open_companions(const std::string& folder, std::string_view soname) {
  if (soname.substr(0, 8) != "libnvrtc") return;
  std::error_code ignored;
  for (fs::directory_iterator i(folder, ignored), end; i != end; i.increment(ignored))
    if (i->path().filename().string().starts_with("libnvrtc-builtins.so"))
      dlopen(i->path().c_str(), RTLD_NOW | RTLD_GLOBAL);
}

std::optional<Library> open_in(const std::vector<std::string>& folders, const std::vector<std::string>& names) {
  std::error_code ignored;
  for (const std::string& folder : folders)
    for (const std::string& name : names) {
      const std::string path = folder + "/" + name;
      if (!fs::exists(path, ignored)) continue;
      open_companions(folder, name);
      if (void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL))
        return Library{.handle = handle, .path = path_of(handle, path)};
    }
  return std::nullopt;
}

std::optional<Library> open_by_name(const std::vector<std::string>& names, int flags) {
  for (const std::string& name : names)
    if (void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | flags))
      return Library{.handle = handle, .path = path_of(handle, name)};
  return std::nullopt;
}

Library open(std::string_view sonames, std::string_view source) {
  const std::vector<std::string> names = split(sonames, ' ');
  const auto own = folders_of("LOWBIT_CUDA_PATH", ""), packages = folders_of_packages(),
             home = folders_of("CUDA_HOME", "/lib64");
  auto found = open_in(own, names);
  if (!found) found = open_by_name(names, RTLD_NOLOAD);
  if (!found) found = open_in(packages, names);
  if (!found) found = open_in(home, names);
  if (!found) found = open_by_name(names, 0);
  if (found) return *found;
  std::string looked;
  for (const auto* folders : {&own, &packages, &home})
    for (const std::string& folder : *folders) looked += folder + ", ";
  return {.missing = concat(names[0], " was not found in ", looked, "nor where the system looks (", source, ")")};
}

}  // namespace

void* Library::symbol(const char* name) const {
  check(handle != nullptr, ErrorKind::runtime, missing);
  void* const address = dlsym(handle, name);
  check(address != nullptr, ErrorKind::runtime, path, " has no ", name, ": it is too old");
  return address;
}

const Library& library(LibraryName name) {
  static std::array<std::atomic<const Library*>, std::size(kLibraryNames)> kept{};
  return made_once(kept[static_cast<std::size_t>(name)], [name] {
#define LOWBIT_CUDA_LIBRARY(which, sonames, source) \
  if (name == LibraryName::which) return open(sonames, source);
    LOWBIT_CUDA_LIBRARIES(LOWBIT_CUDA_LIBRARY)
#undef LOWBIT_CUDA_LIBRARY
    return Library{};
  });
}

void look_in(std::vector<std::string> folders) { site_packages = std::move(folders); }

}  // namespace lowbit::cuda
