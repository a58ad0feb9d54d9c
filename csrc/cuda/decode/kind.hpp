// SPDX-License-Identifier: Apache-2.0
// Specialisations of the decode kernels, and their sources.
#pragma once

#include "cuda/decode/call.hpp"
#include "cuda/sources.hpp"

namespace lowbit {
struct DecodeArgs;
struct ScoreCall;
}

namespace lowbit::cuda {

struct DecodeKind {
  DecodeShape shape;
  const ScoreCall *score = nullptr, *mask = nullptr;
  SourceKey key() const;
};

DecodeKind kind_of(const DecodeArgs& args);
LOWBIT_API Source decode_source(const DecodeKind& kind);
LOWBIT_API Source combine_source();
LOWBIT_API Source kv_convert_source(KvFormat format, int groups);  // for both directions

}  // namespace lowbit::cuda
