// SPDX-License-Identifier: Apache-2.0
#include "cuda/runtime/libraries.hpp"

#include <algorithm>
#include <array>
#include <filesystem>

#include "core/once.hpp"
#include "core/os.hpp"

namespace lowbit::cuda {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> folders_of_packages() {
  std::vector<std::string> folders;
  std::error_code ignored;
  for (const std::string& site : site_packages())
    for (fs::directory_iterator i(fs::path(site) / "nvidia", ignored), end; i != end; i.increment(ignored))
      if (fs::is_directory(i->path() / "lib", ignored)) folders.push_back((i->path() / "lib").string());
  std::sort(folders.begin(), folders.end());
  return folders;
}

// The compiler opens libnvrtc-builtins by name, and NVRTC 13.0 has no run path to find it: it is opened here first,
// even if torch has opened NVRTC.
void open_companions(const std::string& folder, std::string_view soname) {
  if (!soname.starts_with("libnvrtc")) return;
  std::error_code ignored;
  for (fs::directory_iterator i(folder, ignored), end; i != end; i.increment(ignored))
    if (i->path().filename().string().starts_with("libnvrtc-builtins.so"))
      os::open_library(i->path().string().c_str(), true);
}

Library open(std::string_view sonames, std::string_view source) {
  return open_library({.names = sonames, .source = source, .own = folders_of("LOWBIT_CUDA_PATH", ""),
                       .packages = folders_of_packages(), .home = folders_of("CUDA_HOME", "/lib64"),
                       .open_companions = open_companions});
}

// The major version of CUDA that the driver supports; 0 without a driver.
int driver_major() {
  const Library& driver = library(LibraryName::driver);
  void* const address = driver.handle ? os::find_symbol(driver.handle, "cuDriverGetVersion") : nullptr;
  int number = 0;
  return address && reinterpret_cast<int (*)(int*)>(address)(&number) == 0 ? number / 1000 : 0;
}

// A driver of CUDA 12 does not load code made by CUDA 13: there the older file is preferred.
std::string best_first(LibraryName name, std::string_view sonames) {
  const std::size_t end = sonames.find(' ');
  if (name == LibraryName::driver || end == sonames.npos || driver_major() != 12) return std::string(sonames);
  return concat(sonames.substr(end + 1), " ", sonames.substr(0, end));
}

}  // namespace

const Library& library(LibraryName name) {
  static std::array<std::atomic<const Library*>, std::size(kLibraryNames)> kept{};
  return made_once(kept[static_cast<std::size_t>(name)], [name] {
#define LOWBIT_CUDA_LIBRARY(which, sonames, source) \
  if (name == LibraryName::which) return open(best_first(name, sonames), source);
    LOWBIT_CUDA_LIBRARIES(LOWBIT_CUDA_LIBRARY)
#undef LOWBIT_CUDA_LIBRARY
    return Library{};
  });
}

}  // namespace lowbit::cuda
