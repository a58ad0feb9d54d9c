// SPDX-License-Identifier: Apache-2.0
#include "cuda/runtime/cubin_cache.hpp"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>

#include "cuda/runtime/nvrtc.hpp"

namespace lowbit::cuda {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kMagic = "lowbit code 1\n";

// FNV-1a of 128 bits. Each text ends with a byte that no text has.
class Hash {
 public:
  Hash& add(std::string_view text) {
    for (const char c : text) step(static_cast<unsigned char>(c));
    step(0);
    return *this;
  }
  std::string text() const {
    char digits[33];
    std::snprintf(digits, sizeof digits, "%016llx%016llx", static_cast<unsigned long long>(state_ >> 64),
                  static_cast<unsigned long long>(state_));
    return digits;
  }

 private:
  __extension__ using Wide = unsigned __int128;
  void step(unsigned char byte) { state_ = (state_ ^ byte) * (Wide{0x1000000} << 64 | 0x13b); }
  Wide state_ = Wide{0x6c62272e07bb0142} << 64 | 0x62b821756295c58d;
};

fs::path folder() {
  const auto value = [](const char* name) {
    const char* text = std::getenv(name);
    return std::string(text ? text : "");
  };
  if (const std::string own = value("LOWBIT_CACHE_DIR"); !own.empty()) return fs::path(own) / "cuda";
  if (const std::string xdg = value("XDG_CACHE_HOME"); !xdg.empty()) return fs::path(xdg) / "lowbit" / "cuda";
  return fs::path(value("HOME")) / ".cache" / "lowbit" / "cuda";
}

}  // namespace

std::string cached_path(const std::string& source, const std::string& architecture) {
  Hash hash;
  for (const DeviceHeader& header : device_headers()) hash.add(header.name).add(header.text);
  hash.add(source).add(architecture).add(compile_options());
  return (folder() / concat(architecture, "-", hash.text(), ".cubin")).string();
}

std::string cached_plan_path(const std::string& plan, const std::string& device) {
  return (folder() / concat(device, "-", Hash().add(plan).text(), ".plan")).string();
}

std::optional<std::string> read_cached(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream all;
  if (!file || !(all << file.rdbuf())) return std::nullopt;
  std::string text = std::move(all).str();
  if (!text.starts_with(kMagic)) return std::nullopt;
  return text.substr(kMagic.size());
}

std::optional<std::string> read_packed(const std::string& path) {
  Dl_info found{};
  if (!dladdr(reinterpret_cast<const void*>(&read_packed), &found) || !found.dli_fname) return std::nullopt;
  return read_cached((fs::path(found.dli_fname).parent_path() / "cubins" / fs::path(path).filename()).string());
}

std::string write_cached(const std::string& path, const std::string& image) {
  std::error_code error;
  fs::create_directories(fs::path(path).parent_path(), error);
  const std::string aside = concat(path, ".", getpid(), ".", static_cast<const void*>(&image));
  {
    std::ofstream file(aside, std::ios::binary);
    file << kMagic << image;
    if (!file.flush()) {
      fs::remove(aside, error);
      return "cannot write " + aside;
    }
  }
  fs::rename(aside, path, error);
  return error ? error.message() : "";
}

}  // namespace lowbit::cuda
