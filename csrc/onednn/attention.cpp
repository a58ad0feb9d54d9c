// SPDX-License-Identifier: Apache-2.0
// The row of the op attention_forward. What oneDNN is not asked for is refused here; how it does the rest: sdpa.hpp.
#include <cstring>
#include <limits>

#include "core/parallel.hpp"
#include "onednn/backend.hpp"
#include "onednn/operands.hpp"
#include "onednn/room.hpp"
#include "onednn/sdpa.hpp"
#include "ops/attention.hpp"

namespace lowbit::onednn {
namespace {

constexpr float kHidden = -std::numeric_limits<float>::infinity();
constexpr int64_t kMostMask = 1 << 28;  // elements of the float mask that is made for a call: 1 GiB

Attention::Strides strides_of(const TensorView& tensor) {
  return {tensor.stride[0], tensor.stride[1], tensor.stride[2]};
}

Attention attention_of(const AttentionForwardArgs& args, int threads) {
  return {.batch = args.batch(), .kv_heads = args.kv_heads(), .group = args.group(), .q_length = args.q_length(),
          .kv_length = args.kv_length(), .e = args.q.size(3), .ev = args.ev(), .q = strides_of(args.q),
          .k = strides_of(args.k), .v = strides_of(args.v), .out = strides_of(args.out), .dtype = args.q.dtype,
          .has_mask = args.causal || args.mask, .mask_batch = args.mask && args.mask.stride[0] != 0,
          .mask_heads = args.mask && args.mask.stride[1] != 0, .threads = threads};
}

int64_t masks_of(const Attention& of) {
  return (of.mask_batch ? of.batch : 1) * (of.mask_heads ? of.kv_heads * of.group : 1);
}

bool is_expanded(const TensorView& tensor) {
  for (int d = 0; d < 4; d++)
    if (tensor.size(d) > 1 && tensor.stride[d] == 0) return true;
  return false;
}

std::string_view refuses_options(const AttentionForwardArgs& args) {
  if (!is_activation(args.q.dtype)) return "inputs are neither float32 nor bfloat16 nor float16";
  if (args.out.dtype != args.q.dtype) return "a result of another dtype than that of the inputs";
  if (args.score_mod || args.mask_mod || args.lists.kv_num_blocks) return "mods and block masks";
  if (args.dropout_p > 0) return "dropout";
  if (args.sink) return "a sink";
  if (args.max_scores && args.max_scores.numel()) return "the largest score of each row is wanted";
  if (args.k_scale) return "keys and values as codes";
  if (args.mask && args.mask.dtype == DType::float64) return "a mask of float64";
  if (!args.q.numel() || !args.k.numel() || !args.out.numel()) return "nothing to multiply";
  if (is_expanded(args.q) || is_expanded(args.k) || is_expanded(args.v)) return "an expanded tensor";
  const Attention of = attention_of(args, 1);
  return of.has_mask && masks_of(of) * of.q_length * of.kv_length > kMostMask
             ? "a mask of more than 1 GiB would be made of it" : "";
}

// What oneDNN itself says of it. The text lives until this thread asks again.
std::string_view refuses(const AttentionForwardArgs& args) {
  if (const std::string_view reason = refuses_options(args); !reason.empty()) return reason;
  thread_local std::string reason;
  try {
    const Threads threads;
    reason = sdpa(attention_of(args, threads.count()))->reason();
  } catch (const std::exception& error) {  // a listing of all rows goes on with the reasons of the others
    reason = error.what();
  }
  return reason;
}

float mask_value(const TensorView& mask, int64_t at) {
  switch (mask.dtype) {
    case DType::float32: return mask.as<const float>()[at];
    case DType::bfloat16: return float_from_bfloat16(mask.as<const uint16_t>()[at]);
    case DType::float16: return float_from_float16(mask.as<const uint16_t>()[at]);
    default: return mask.as<const uint8_t>()[at] ? 0.0f : kHidden;
  }
}

// Row q of mask number `which`, with what causality hides; whether all of it is hidden.
bool write_row(const AttentionForwardArgs& args, const Attention& of, int64_t which, int64_t q, float* to) {
  const int64_t heads = of.mask_heads ? args.heads() : 1,
                seen = args.causal ? smaller(of.kv_length, q + 1) : of.kv_length;
  const auto& stride = args.mask.stride;
  bool hidden = true;
  for (int64_t k = 0; k < of.kv_length; k++) {
    const int64_t at = which / heads * stride[0] + which % heads * stride[1] + q * stride[2] + k * stride[3];
    to[k] = k >= seen ? kHidden : args.mask ? mask_value(args.mask, at) : 0.0f;
    hidden &= to[k] == kHidden;
  }
  return hidden;
}

// A row that sees nothing: of it oneDNN says that lse is 0, and 0 times inf of a value is nan.
void end_hidden_rows(const AttentionForwardArgs& args, const Attention& of, const uint8_t* hidden, float* lse) {
  const int64_t heads = args.heads(), size = static_cast<int64_t>(size_of(of.dtype));
  for (int64_t row = 0; row < of.batch * heads * of.q_length; row++) {
    const int64_t b = row / of.q_length / heads, h = row / of.q_length % heads, q = row % of.q_length;
    const int64_t which = (of.mask_batch ? b : 0) * (of.mask_heads ? heads : 1) + (of.mask_heads ? h : 0);
    if (!hidden[which * of.q_length + q]) continue;
    const int64_t at = b * of.out[0] + h * of.out[1] + q * of.out[2];
    std::memset(args.out.as<char>() + at * size, 0, static_cast<std::size_t>(of.ev * size));
    lse[row] = kHidden;
  }
}

void run(const AttentionForwardArgs& args) {
  const Threads threads;
  const Attention of = attention_of(args, threads.count());
  const auto attention = sdpa(of);
  const int64_t masks = of.has_mask ? masks_of(of) : 0, rows = masks * of.q_length;
  struct Call {
    float* mask;
    uint8_t* hidden;
    float* lse;
  };
  const Call call = in_room<Call>([&](Parts& parts) {
    return Call{parts.take<float>(rows * of.kv_length), parts.take<uint8_t>(rows),
                parts.take<float>(args.lse ? 0 : args.batch() * args.heads() * args.q_length())};
  });
  parallel_for(rows, threads_for(rows * of.kv_length), [&](int64_t row) {
    call.hidden[row] = write_row(args, of, row / of.q_length, row % of.q_length, call.mask + row * of.kv_length);
  });
  const auto scale = static_cast<float>(args.scale);
  auto* const lse = args.lse ? args.lse.as<float>() : call.lse;
  attention->run({.q = args.q.data, .k = args.k.data, .v = args.v.data, .scale = &scale, .mask = call.mask,
                  .out = args.out.data, .lse = lse});
  if (of.has_mask) end_hidden_rows(args, of, call.hidden, lse);
}

constexpr Kernel<AttentionForwardArgs> kRows[] = {{"attention_forward_graph_onednn", refuses, run}};

}  // namespace

void add_attention_rows(Backend& backend) { add_rows(backend, kRows, std::size(kRows)); }

}  // namespace lowbit::onednn
