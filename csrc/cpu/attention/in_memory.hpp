// SPDX-License-Identifier: Apache-2.0
// The arguments of an attention call that are in memory, which only a row may read: the blocks to visit, the key of
// dropout, captured integers; also the faults that programs report once the tiles are done. Compiled once, for all
// instruction sets.
#pragma once

#include "cpu/attention/call.hpp"
#include "ops/decode.hpp"

namespace lowbit::cpu {

// Runs the tiles with `blocks` and `key` of the call filled in. Raises ValueError for an invalid list entry, IndexError
// for a gather out of range.
void with_memory(ForwardCall call, void (*tiles)(const ForwardCall&));
void with_memory(const AttentionForwardArgs& args, void (*tiles)(const ForwardCall&));
// Likewise, with `captured`; gradients that are accumulated start at 0.
void with_memory(const AttentionBackwardArgs& args, void (*tiles)(const BackwardCall&));
void with_memory(const DecodeArgs& args, void (*splits)(const DecodeArgs&));

}  // namespace lowbit::cpu
