// SPDX-License-Identifier: Apache-2.0
// Rows of scores that a float mask hides whole: their result has to be 0 and their lse -inf, and what cuDNN writes there
// is not known.
#pragma once

#include "gpu/attention/call.hpp"

namespace lowbit::cuda {

constexpr int kHiddenRowsThreads = 128;

struct HiddenRowsCall {
  gpu::HeadRows out;
  const void* bias;
  float* lse;  // or null
  int64_t bias_stride[4];
  int64_t rows, heads, length, columns, keys;
  int64_t after, window;  // query q sees keys up to q + after; if window > 0, none `window` or more positions before it
  DType dtype, bias_dtype;
};

}  // namespace lowbit::cuda
