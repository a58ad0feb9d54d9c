// SPDX-License-Identifier: Apache-2.0
// Source text of kernels to code of a device. The headers that it may include are in the library (device_headers.cpp).
#pragma once

#include <span>
#include <string>

#include "core/error.hpp"

namespace lowbit::cuda {

struct DeviceHeader {
  const char* name;  // as it is included
  const char* text;
};
std::span<const DeviceHeader> device_headers();

// Older ones do not know __builtin_bit_cast, which csrc/formats computes tables with.
inline constexpr int kOldestNvrtc = 12060;  // 12.6

// `version` is that of NVRTC, `number` the same as kOldestNvrtc has it; "" and 0 where it was not found.
struct Compiler {
  std::string version, path;
  int number = 0;
};
const Compiler& compiler();

struct Compiled {
  std::string image;   // a cubin, or PTX
  std::string log;     // registers, spills and warnings
  std::string target;  // of the compilation: the architecture, or "compute_120" for one that NVRTC does not know
};

// An Error if NVRTC is missing (with the places that were searched) or too old, or refuses the architecture or
// the source.
LOWBIT_API Compiled compile(const std::string& name, const std::string& source, const std::string& architecture);

// Everything that code depends on besides source and architecture.
std::string compile_options();

}  // namespace lowbit::cuda
