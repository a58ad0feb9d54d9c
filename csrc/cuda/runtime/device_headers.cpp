// SPDX-License-Identifier: Apache-2.0
#include "cuda/runtime/nvrtc.hpp"

namespace lowbit::cuda {

std::span<const DeviceHeader> device_headers() {
  static constexpr DeviceHeader all[] = {
#include "cuda/device_headers.inc"  // csrc/cuda/CMakeLists.txt makes it
  };
  return all;
}

}  // namespace lowbit::cuda
