// SPDX-License-Identifier: Apache-2.0
// The cuDNN library, if there is one, and its handles. Its functions are declared here; graphs are cudnn-frontend's.
#pragma once

#include <string>

#include "core/place.hpp"
#include "cuda/cudnn/plan.hpp"

namespace lowbit::cuda {

// Why no plan can be made: not in this build, not on this machine, too old, or a release with known faults; else "".
// The first call opens the library.
LOWBIT_API const std::string& cudnn_missing();

LOWBIT_API std::size_t cudnn_version();  // 91900 is 9.19.0; an Error if there is none

// RAII: a handle of the place's device with the place's stream, used by no other thread meanwhile. Requires the
// device's context to be current. Handles cost 100 ms and are kept until the process ends.
class HandleFor {
 public:
  explicit HandleFor(const Place& place);
  ~HandleFor();
  HandleFor(const HandleFor&) = delete;
  HandleFor& operator=(const HandleFor&) = delete;
  CudnnHandle get() const { return handle_; }

 private:
  Device device_;
  CudnnHandle handle_ = nullptr;
};

}  // namespace lowbit::cuda
