// SPDX-License-Identifier: Apache-2.0
// A disk cache of code compiled for a device: one process writes it, every later one reads it.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "core/error.hpp"

namespace lowbit {

// 128-bit FNV-1a. Each text is terminated by a byte that occurs in no text.
class LOWBIT_API Hash {
 public:
  Hash& add(std::string_view text);
  std::string text() const;

 private:
  __extension__ using Wide = unsigned __int128;
  void step(unsigned char byte) { state_ = (state_ ^ byte) * (Wide{0x1000000} << 64 | 0x13b); }
  Wide state_ = Wide{0x6c62272e07bb0142} << 64 | 0x62b821756295c58d;
};

// The cache folder of one device: in LOWBIT_CACHE_DIR, else in lowbit under XDG_CACHE_HOME or ~/.cache.
std::filesystem::path cache_folder(std::string_view device);

// The content of a file, or nothing if the file is truncated or corrupt.
std::optional<std::string> read_cached(const std::string& path);

// Writes a temporary file and renames it: a reader sees all of it or nothing, and one of two concurrent writers wins.
// Returns why the file could not be written, or "".
std::string write_cached(const std::string& path, const std::string& image);

}  // namespace lowbit
