// SPDX-License-Identifier: Apache-2.0
// Attention of oneDNN: one partition of its graph API, compiled once for all that it depends on.
#pragma once

#include <array>
#include <compare>
#include <memory>
#include <string>

#include "core/dtype.hpp"
#include "onednn/runtime.hpp"

namespace lowbit::onednn {

// Query heads are [kv_heads][group]. Strides, in elements, of batch, head and row; the last dimension is dense.
struct Attention {
  using Strides = std::array<int64_t, 3>;
  int64_t batch, kv_heads, group, q_length, kv_length, e, ev;
  Strides q, k, v, out;
  DType dtype;
  bool has_mask, mask_batch, mask_heads;  // float32 [batch or 1, heads or 1, q_length, kv_length], added to the scores
  int threads;
  friend auto operator<=>(const Attention&, const Attention&) = default;
};

struct AttentionOperands {
  const void *q, *k, *v;
  const float *scale, *mask;
  void* out;
  float* lse;  // [batch, heads, q_length]; 0 of a row that may see nothing
};

class Sdpa {
 public:
  explicit Sdpa(const Attention& attention);
  const std::string& reason() const { return reason_; }  // why oneDNN cannot run it; "" if it can
  void run(const AttentionOperands& operands) const;

 private:
  std::string compile(const Attention& attention);

  struct Destroy {
    void operator()(CompiledPartition compiled) const { api().compiled_destroy(compiled); }
  };
  std::string reason_;
  LogicalTensor q_, k_, v_, scale_, mask_, out_, lse_;
  bool has_mask_;
  std::unique_ptr<CompiledPartitionHandle, Destroy> compiled_;
};

// Made or found.
std::shared_ptr<const Sdpa> sdpa(const Attention& attention);

}  // namespace lowbit::onednn
