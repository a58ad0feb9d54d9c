// SPDX-License-Identifier: Apache-2.0
// Arguments of the kernels of decode, kv_quantize and kv_dequantize: the same text for host and device.
#pragma once

#include "level_zero/attention/call.hpp"

namespace lowbit::level_zero {

constexpr int kDecodeRows = kSubGroups;  // queries per work-group, one per sub-group
constexpr int kSplit = 256;              // keys per work-group
constexpr int kMaxCodes = 512;          // max columns of codes

enum class KvKind : int32_t { floating, int8, int4 };  // KvFormat of ops/decode.hpp

// [B, H, length, columns] of floats, or of codes with scales.
struct KvRows {
  gpu::HeadRows rows{}, scales{};
  KvKind kind = KvKind::floating;
  DType dtype = DType::other, scale_dtype = DType::other;
  int32_t columns = 0, padded = 0;  // kv_padded, for codes
};

struct DecodeCall {
  gpu::HeadRows q{}, out{};
  KvRows k{}, v{};
  DType dtype = DType::other, bias_dtype = DType::other;  // dtype of q and out; of the mask
  int32_t batch = 0, heads = 0, group = 0, length = 0, kv_length = 0;
  int32_t row_tiles = 0, splits = 0;  // tiles of the queries that share keys; splits of the keys
  int64_t position = 0, window = 0;
  float scale = 0;
  bool causal = false;
  int32_t rotation = 0;  // kv_rotation of keys, and so of queries, or 0
  float* lse = nullptr;
  const float* sink = nullptr;
  const void* bias = nullptr;
  int64_t bias_stride[4] = {};
  ModTable score{}, mask{};
  float* partial = nullptr;  // [B, Hq, L, splits, ev + 2]: sums, largest score and total of each split
};

struct KvCodesCall {
  gpu::HeadRows x{};
  KvRows codes{};
  DType dtype = DType::other;  // dtype of x
  int32_t batch = 0, heads = 0, length = 0, rotation = 0;
};

}  // namespace lowbit::level_zero
