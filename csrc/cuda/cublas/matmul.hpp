// SPDX-License-Identifier: Apache-2.0
// Products of dense matrices by cuBLASLt, through its C functions: declared by us, opened when first needed.
#pragma once

#include <array>
#include <string>

#include "core/dtype.hpp"
#include "core/place.hpp"

namespace lowbit::cuda {

// y[m, n] = sum over k of x[m, k] * w[n, k]: of bfloat16 or float16 in float32, of int8 in int32. Rows follow each
// other.
struct Matmul {
  int64_t m, n, k;
  DType dtype;  // of x and w
  const void *x, *w;
  void* y;
};

inline constexpr int64_t kMatmulWorkspace = int64_t{32} << 20;  // what NVIDIA recommends for Hopper

// An algorithm of cuBLASLt for a product of these sizes, dtype and alignments: found once, in some 100 us of the host.
struct MatmulAlgorithm {
  std::array<uint64_t, 8> data{};
  std::string refused = {};  // why there is none
};
const MatmulAlgorithm& algorithm_for(const Place& place, const Matmul& matmul);

// Needs the device's context to be the current one. `workspace`: of kMatmulWorkspace bytes.
void run(const Place& place, const Matmul& matmul, void* workspace);

}  // namespace lowbit::cuda
