// SPDX-License-Identifier: Apache-2.0
// Products of dense matrices by cuBLASLt, through its C functions, declared here and loaded on first use.
#pragma once

#include <array>
#include <string>

#include "core/place.hpp"
#include "cuda/dense_product.hpp"

namespace lowbit::cuda {

inline constexpr int64_t kMatmulWorkspace = int64_t{32} << 20;  // NVIDIA's recommendation for Hopper

// An algorithm of cuBLASLt for a product of these sizes, dtype and alignments: found once, in some 100 us on the host.
struct MatmulAlgorithm {
  std::array<uint64_t, 8> data{};
  std::string refused = {};  // why there is none
};
const MatmulAlgorithm& algorithm_for(const Place& place, const DenseProduct& matmul);

// Requires the device's context to be current. `workspace`: kMatmulWorkspace bytes.
void run(const Place& place, const DenseProduct& matmul, void* workspace);

}  // namespace lowbit::cuda
