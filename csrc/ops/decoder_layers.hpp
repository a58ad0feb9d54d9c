// SPDX-License-Identifier: Apache-2.0
// decoder_layers: layers of a decoder (Llama, Mistral, Qwen, Gemma), as the calls of other ops that they are made of:
//   h = x + n1(o(attention(rope_append(qkv(n0(x))))));  y = h + n3(down(act(gate(n2(h))) * up(n2(h))))
// n0 and n2 are rms_norm; so are n1 and n3 in a layer of four norms (Gemma), and nothing in one of two. The op has no
// rows of its own: each call takes its own row. It saves the way back to Python between them. One token's weights push
// Python out of the caches: 30 layers of 576 columns took 4.6 ms in rows and 4.4 in Python.
#pragma once

#include <span>
#include <variant>
#include <vector>

#include "ops/attention.hpp"
#include "ops/linear.hpp"
#include "ops/rms_norm.hpp"
#include "ops/rope_append.hpp"

namespace lowbit {

struct DecoderLayer {
  struct Linear {
    TensorView weight, bias;  // bias may be missing
    WeightSpec spec;
    int64_t x_format = 0;
    int64_t row = 0;  // that it prefers (ops/preferred_row.hpp)
  };
  std::vector<Linear> qkv;           // [(Hq + 2 Hkv) E, k]; or, where x has one row, three of other formats behind it
  Linear o, gate, up, down;          // [k, Hq E], [n, k], [n, k], [k, n]
  std::vector<TensorView> norms;     // two weights [k], or four
  TensorView q_weight, k_weight;     // as rope_append takes them
  TensorView keys, values;           // [B, Hkv, S, E]: tokens start to start + L are written, 0 to start + L are seen
};

struct DecoderLayersArgs {
  TensorView x;                      // [B, L, k] float32, bfloat16 or float16, contiguous
  std::vector<DecoderLayer> layers;
  double eps = 0, offset = 0;        // of the norms
  int64_t activation = 0;            // of gate
  TensorView cos, sin;               // as rope_append takes them
  double heads_eps = 0, heads_offset = 0;
  int64_t start = 0;
  TensorView mask;                   // of keys 0 to start + L, as attention takes it, or empty
  bool causal = false;               // for start = 0
  double scale = 1;
  const ScoreCall* score_mod = nullptr;
  TensorView y;                      // shape and dtype of x, contiguous: written
};

struct DecoderCalls {
  struct Product {
    LinearArgs args;
    int64_t row;
  };
  std::vector<std::variant<RmsNormArgs, Product, RopeAppendArgs, AttentionForwardArgs>> calls;

  LOWBIT_API void run() const;
};

// The bytes that lie between the calls.
LOWBIT_API int64_t decoder_bytes(const DecoderLayersArgs& args);
// The calls of all layers, every one checked before the first runs. Without memory they are checked and cannot run.
LOWBIT_API DecoderCalls decoder_calls(const DecoderLayersArgs& args, std::span<char> memory);

}  // namespace lowbit
