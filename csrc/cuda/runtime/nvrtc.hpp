// SPDX-License-Identifier: Apache-2.0
// Compiles kernel sources to device code. The headers that they may include are in the library (device_headers.cpp).
#pragma once

#include <span>
#include <string>

#include "core/error.hpp"

namespace lowbit::cuda {

struct DeviceHeader {
  const char* name;  // name in #include
  const char* text;
};
std::span<const DeviceHeader> device_headers();

// Older ones lack __builtin_bit_cast, with which csrc/formats computes tables.
inline constexpr int kOldestNvrtc = 12060;  // 12.6

// The version of NVRTC as text and as a number, encoded like kOldestNvrtc; "" and 0 if not found.
struct Compiler {
  std::string version, path;
  int number = 0;
};
const Compiler& compiler();

struct Compiled {
  std::string image;   // a cubin, or PTX
  std::string log;     // registers, spills and warnings
  std::string target;  // the architecture, or "compute_120" for one unknown to NVRTC
};

// An Error if NVRTC is missing (with the folders searched) or too old, or rejects the architecture or the source.
LOWBIT_API Compiled compile(const std::string& name, const std::string& source, const std::string& architecture);

// Everything that code depends on besides source and architecture.
std::string compile_options();

}  // namespace lowbit::cuda
