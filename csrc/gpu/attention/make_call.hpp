// SPDX-License-Identifier: Apache-2.0
// Host code that makes the arguments of an attention kernel from those of an op.
#pragma once

#include "gpu/attention/call.hpp"
#include "ops/attention.hpp"

namespace lowbit::gpu {

inline HeadRows rows_of(const TensorView& tensor) {
  return {tensor.data, tensor.stride[0], tensor.stride[1], tensor.stride[2]};
}

inline ListCall list_of(const TensorView& counts, const TensorView& indices) {
  if (!counts) return {};
  return {counts.as<const int32_t>(), indices.as<const int32_t>(),
          {counts.stride[0], counts.stride[1], counts.stride[2]},
          {indices.stride[0], indices.stride[1], indices.stride[2], indices.stride[3]},
          indices.size(3)};
}

inline int64_t class_count(const AttentionForwardArgs& args) {
  const TensorView& counts = args.lists.kv_num_blocks;
  return counts ? counts.numel() * ceil_div(args.kv_length(), args.lists.kv_block) : 0;
}

// Leaves out the mods. classes: class_count(args) bytes of device memory.
template <class Captured>
AttentionCallOf<Captured> attention_call(const AttentionForwardArgs& args, int q_tile, int kv_tile, uint8_t* classes) {
  const BlockLists& lists = args.lists;
  const bool blocks = static_cast<bool>(lists.kv_num_blocks);
  AttentionCallOf<Captured> call{.q = rows_of(args.q), .k = rows_of(args.k), .v = rows_of(args.v),
                                 .out = rows_of(args.out),
                                 .q_tiles = Tiling(args.q_length(), blocks ? lists.q_block : 0, q_tile),
                                 .kv_tiles = Tiling(args.kv_length(), blocks ? lists.kv_block : 0, kv_tile)};
  call.batch = static_cast<int32_t>(args.batch()), call.heads = static_cast<int32_t>(args.heads()),
  call.launched_heads = call.batch * call.heads, call.group = static_cast<int32_t>(args.group()),
  call.causal = args.causal, call.out_dtype = args.out.dtype, call.scale = static_cast<float>(args.scale),
  call.lse = args.lse.as<float>(), call.max_scores = args.max_scores.as<float>(),
  call.sink = args.sink.as<const float>(), call.bias = args.mask.data;
  for (int d = 0; d < 4; d++) call.bias_stride[d] = args.mask ? args.mask.stride[d] : 0;
  call.seed = args.seed.as<const int64_t>(), call.dropped = static_cast<uint64_t>(args.dropout_p * 0x1p32),
  call.kept = args.dropout_p < 1 ? static_cast<float>(1 / (1 - args.dropout_p)) : 0.0f;
  if (!blocks) return call;
  const TensorView& counts = lists.kv_num_blocks;
  call.classes = classes;
  call.class_columns = ceil_div(args.kv_length(), lists.kv_block), call.class_rows = counts.size(2),
  call.class_heads = counts.size(1);
  call.class_head = call.class_heads > 1 ? call.class_rows * call.class_columns : 0,
  call.class_batch = counts.size(0) > 1 ? call.class_heads * call.class_rows * call.class_columns : 0;
  call.lists[0] = list_of(counts, lists.kv_indices),
  call.lists[1] = list_of(lists.full_kv_num_blocks, lists.full_kv_indices);
  return call;
}

}  // namespace lowbit::gpu
