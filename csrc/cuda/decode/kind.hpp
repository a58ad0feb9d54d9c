// SPDX-License-Identifier: Apache-2.0
// How the kernels of a decode call are specialised, and their sources.
#pragma once

#include "cuda/decode/call.hpp"
#include "cuda/sources.hpp"

namespace lowbit {
struct DecodeArgs;
}

namespace lowbit::cuda {

DecodeShape shape_of(const DecodeArgs& args);
SourceKey key_of(const DecodeShape& shape);
LOWBIT_API Source decode_source(const DecodeShape& shape);
LOWBIT_API Source combine_source();
LOWBIT_API Source kv_convert_source(KvFormat format, int groups);  // both directions

}  // namespace lowbit::cuda
