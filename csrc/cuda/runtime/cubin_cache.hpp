// SPDX-License-Identifier: Apache-2.0
// Code of devices on disk, so that one process compiles it and every later one loads it.
#pragma once

#include <optional>
#include <string>

namespace lowbit::cuda {

// The file of a source for an architecture: named by a hash of both, of every header and of the options. Not of NVRTC's
// version: what another one made is as good, and a machine without NVRTC can use it. Folder: LOWBIT_CACHE_DIR, else
// lowbit in XDG_CACHE_HOME or ~/.cache.
std::string cached_path(const std::string& source, const std::string& architecture);

// Likewise the file of a plan, which a library made for an architecture and a number of multiprocessors (`device`).
std::string cached_plan_path(const std::string& plan, const std::string& device);

std::optional<std::string> read_cached(const std::string& path);

// The file of that name in the pack that came with the library (LOWBIT_CUBIN_PACK in csrc/cuda/CMakeLists.txt).
std::optional<std::string> read_packed(const std::string& path);

// Written aside and renamed: a reader sees all of it or nothing, and of two writers one wins. Returns why it could not
// be kept, "" if it was.
std::string write_cached(const std::string& path, const std::string& image);

}  // namespace lowbit::cuda
