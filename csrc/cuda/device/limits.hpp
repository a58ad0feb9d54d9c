// SPDX-License-Identifier: Apache-2.0
// Max shared memory of a CTA, in bytes.
#pragma once

namespace lowbit::cuda {

constexpr int kMaxShared = 99 << 10;            // every GPU from 8.0 on
constexpr int kMaxSharedOnHopper = 227 << 10;  // compute capability 9.0

}  // namespace lowbit::cuda
