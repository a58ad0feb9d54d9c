// SPDX-License-Identifier: Apache-2.0
#include "core/disk_cache.hpp"

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <system_error>

#include "core/os.hpp"

namespace lowbit {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kMagic = "lowbit code 2\n";

// The header of a file: a magic number and the hash of the content.
std::string head_of(std::string_view content) { return concat(kMagic, Hash().add(content).text(), "\n"); }

}  // namespace

Hash& Hash::add(std::string_view text) {
  for (const char c : text) step(static_cast<unsigned char>(c));
  step(0);
  return *this;
}

std::string Hash::text() const {
  char digits[33];
  std::snprintf(digits, sizeof digits, "%016llx%016llx", static_cast<unsigned long long>(state_ >> 64),
                static_cast<unsigned long long>(state_));
  return digits;
}

fs::path cache_folder(std::string_view device) {
  const auto value = [](const char* name) {
    const char* text = std::getenv(name);
    return std::string(text ? text : "");
  };
  if (const std::string own = value("LOWBIT_CACHE_DIR"); !own.empty()) return fs::path(own) / device;
  if (const std::string xdg = value("XDG_CACHE_HOME"); !xdg.empty()) return fs::path(xdg) / "lowbit" / device;
  return fs::path(value("HOME")) / ".cache" / "lowbit" / device;
}

std::optional<std::string> read_cached(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream all;
  if (!file || !(all << file.rdbuf())) return std::nullopt;
  const std::string text = std::move(all).str();
  const std::size_t head = kMagic.size() + 33;
  if (text.size() <= head) return std::nullopt;
  std::string content = text.substr(head);
  if (!text.starts_with(head_of(content))) return std::nullopt;
  return content;
}

std::string write_cached(const std::string& path, const std::string& image) {
  std::error_code error;
  fs::create_directories(fs::path(path).parent_path(), error);
  const std::string aside = concat(path, ".", os::process_number(), ".", static_cast<const void*>(&image));
  {
    std::ofstream file(aside, std::ios::binary);
    file << head_of(image) << image;
    if (!file.flush()) {
      fs::remove(aside, error);
      return "cannot write " + aside;
    }
  }
  fs::rename(aside, path, error);
  return error ? error.message() : "";
}

}  // namespace lowbit
