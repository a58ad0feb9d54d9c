// SPDX-License-Identifier: Apache-2.0
// attention: softmax of modified scores times values, and its gradients. At most one tile of scores exists at a time.
//   s = score_mod(scale * q k^T), -inf where mask_mod, causal or a bool mask say no, + a float mask
//   p = softmax over k of s (and of the sink, a column without a value);  out = dropout(p) v;  lse = log sum exp s
// A row that may see nothing has out = 0 and lse = -inf.
#pragma once

#include <span>
#include <string_view>

#include "core/tensor_view.hpp"
#include "ops/kernel.hpp"
#include "ops/tiling.hpp"

namespace lowbit {

// The dtype of accumulators and statistics: float64 for float64 tensors, else float32.
LOWBIT_INLINE DType real_of(DType dtype) { return dtype == DType::float64 ? DType::float64 : DType::float32; }

// The reason of rows that do not serve cu_seqlens.
inline constexpr std::string_view kPackedSequences = "packed sequences (cu_seqlens)";

struct ScoreCall;  // score/program.hpp: a program with its captured tensors

// torch's BlockMask: for each block of queries the kv blocks to visit. All int32. Without one every block is full.
struct BlockLists {
  TensorView kv_num_blocks, kv_indices;  // [B or 1, Hq or 1, q blocks] and [..., kv blocks], or empty: no block mask
  TensorView full_kv_num_blocks, full_kv_indices;  // likewise, or empty
  int64_t q_block = 0, kv_block = 0;
};

// float32, bfloat16, float16 (accumulated in float32) or float64. "Real": float64 for float64 inputs, else float32.
struct AttentionForwardArgs {
  Place place{};
  TensorView q{}, k{}, v{};  // [B, Hq, L, E], [B, Hkv, S, E], [B, Hkv, S, Ev]; last dimension dense, any other strides;
                             // Hq a multiple of Hkv
  TensorView
      out{};  // dtype of q, or real: 16 bits would lose digits that the backward needs
  TensorView lse{};         // real [B, Hq, L], contiguous; the forward may omit it
  TensorView max_scores{};  // real [B, Hq, L], contiguous, or empty: largest s of each row
  TensorView mask{};        // bool or floating [B, Hq, L, S] with any strides (0: broadcast), or empty
  TensorView sink{};        // real [Hq], contiguous, or empty
  double scale = 1;
  bool causal = false;    // query i attends to keys 0..i
  double dropout_p = 0;   // in [0, 1)
  TensorView seed{};  // one int64: key of Philox4x32-10 with the counter (k / 4, q, b * Hq + h, 0), the same for every
                      // tiling and in the backward
  const ScoreCall* score_mod = nullptr;
  const ScoreCall* mask_mod = nullptr;
  BlockLists lists{};
  // [N + 1] int32 or int64, contiguous: sequence n is tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1 of q, k and v, whose
  // B is 1, and sees itself alone; or none. A mask is then [1, Hq, M, M], of which each sequence takes as many rows and
  // columns as it has tokens. There is no lse, no dropout and no block mask.
  TensorView cu_seqlens{};

  int64_t batch() const { return q.size(0); }
  int64_t heads() const { return q.size(1); }
  int64_t kv_heads() const { return k.size(1); }
  int64_t q_length() const { return q.size(2); }
  int64_t kv_length() const { return k.size(2); }
  int64_t group() const { return heads() / kv_heads(); }
  int64_t ev() const { return out.size(3); }
};

struct AttentionGradients {
  TensorView grad_out{};                      // [B, Hq, L, Ev], dtype of out, last dimension dense
  TensorView grad_lse{};                      // real [B, Hq, L] or empty
  TensorView grad_q{}, grad_k{}, grad_v{};    // shapes and dtypes of q, k, v; last dimension dense; written
  TensorView grad_mask{};  // real, sizes of mask where mask has a stride, else stride 0; written; or empty
  TensorView grad_sink{};                     // real [Hq], written, or empty
  // One per tensor captured by score_mod: contiguous, its shape and dtype, written, or not given. Empty: none at all.
  std::span<const TensorView> grad_captured{};
  bool wants_captured() const {
    for (const TensorView& gradient : grad_captured)
      if (gradient) return true;
    return false;
  }
};

struct AttentionBackwardArgs : AttentionGradients {
  Place place{};
  AttentionForwardArgs forward{};  // with out and lse of the forward
};

// A mask whose dimensions of 1 are expanded to [B, Hq, L, S] by strides of 0; the checks refuse other sizes.
LOWBIT_API TensorView stretched(TensorView mask, const TensorView& q, const TensorView& k);
// Likewise the heads alone, of the mask of packed sequences.
LOWBIT_API TensorView stretched(TensorView mask, int64_t heads);

// Runs every check and finds the place; results may lack data.
LOWBIT_API void check_args(AttentionForwardArgs& args);
LOWBIT_API void check_args(AttentionBackwardArgs& args);
// Expects checked arguments.
LOWBIT_API void attention_forward(const AttentionForwardArgs& args);
LOWBIT_API void attention_backward(const AttentionBackwardArgs& args);

LOWBIT_API Call describe(const AttentionForwardArgs& args);
LOWBIT_API Call describe(const AttentionBackwardArgs& args);

}  // namespace lowbit
