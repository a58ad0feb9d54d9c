// SPDX-License-Identifier: Apache-2.0
// A cache on disk for code that was compiled for a device: one process writes it, and every later one reads it.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "core/error.hpp"

namespace lowbit {

// FNV-1a of 128 bits. Each text ends with a byte that no text has.
class LOWBIT_API Hash {
 public:
  Hash& add(std::string_view text);
  std::string text() const;

 private:
  __extension__ using Wide = unsigned __int128;
  void step(unsigned char byte) { state_ = (state_ ^ byte) * (Wide{0x1000000} << 64 | 0x13b); }
  Wide state_ = Wide{0x6c62272e07bb0142} << 64 | 0x62b821756295c58d;
};

// The folder of one device, in LOWBIT_CACHE_DIR, else in lowbit in XDG_CACHE_HOME or ~/.cache.
std::filesystem::path cache_folder(std::string_view device);

// The content of a file, unless the file was cut short or changed.
std::optional<std::string> read_cached(const std::string& path);

// Written aside and renamed: a reader sees all of it or nothing, and of two writers one wins. Returns why it could not
// be kept, "" if it was.
std::string write_cached(const std::string& path, const std::string& image);

}  // namespace lowbit
