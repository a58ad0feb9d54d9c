// SPDX-License-Identifier: Apache-2.0
// The disk cache of code for CUDA devices (core/disk_cache.hpp).
#pragma once

#include <optional>
#include <string>

#include "core/disk_cache.hpp"

namespace lowbit::cuda {

// The file for a source and an architecture: named by a hash of both, of all headers and of the options, but not of
// NVRTC's version: code from another version is as good, and a machine without NVRTC can use it. Folder:
// LOWBIT_CACHE_DIR, else lowbit under XDG_CACHE_HOME or ~/.cache.
std::string cached_path(const std::string& source, const std::string& architecture);

// Likewise for a plan that a library made for an architecture and a number of multiprocessors (`device`).
std::string cached_plan_path(const std::string& plan, const std::string& device);

// The file with that name in the pack shipped with the library (LOWBIT_CUBIN_PACK in csrc/cuda/CMakeLists.txt).
std::optional<std::string> read_packed(const std::string& path);

}  // namespace lowbit::cuda
