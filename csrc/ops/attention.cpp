// SPDX-License-Identifier: Apache-2.0
#include "ops/attention.hpp"

#include <algorithm>
#include <cmath>

#include "ops/checks.hpp"
#include "ops/place.hpp"
#include "score/program.hpp"

namespace lowbit {

using enum ErrorKind;

namespace {

// A tensor like q: 4-d, dtype of q, dense rows.
void check_heads(std::string_view op, std::string_view name, const TensorView& tensor, DType dtype,
                 std::initializer_list<int64_t> shape) {
  check_dtype(op, name, tensor, dtype);
  check_shape(op, name, tensor, shape);
  check_dense_rows(op, name, tensor);
}

void check_statistic(std::string_view op, std::string_view name, const TensorView& tensor, DType real,
                     std::initializer_list<int64_t> shape) {
  if (!tensor) return;
  check_tensor(op, name, tensor, real, shape);
}

void check_list(std::string_view op, std::string_view name, const TensorView& tensor, const TensorView& like,
                int rank) {
  check_dtype(op, name, tensor, DType::int32);
  check(tensor.rank == rank && std::equal(tensor.shape.begin(), tensor.shape.begin() + 3, like.shape.begin()), value,
        op, ": ", name, " must have ", rank, " dimensions and the leading sizes of kv_num_blocks ",
        shape_text(like), ", got ", shape_text(tensor));
}

// Shapes and dtypes; the row reads and checks the entries.
void check_lists(std::string_view op, const AttentionForwardArgs& args) {
  const BlockLists& lists = args.lists;
  if (!lists.kv_num_blocks) return;
  const TensorView& counts = lists.kv_num_blocks;
  check(lists.q_block >= 1 && lists.kv_block >= 1, value, op, ": block_size must be positive, got (", lists.q_block,
        ", ", lists.kv_block, ")");
  check(counts.rank == 3, value, op, ": kv_num_blocks must have shape [B, H, q blocks], got ",
        shape_text(counts));
  check_list(op, "kv_num_blocks", counts, counts, 3);
  check_list(op, "kv_indices", lists.kv_indices, counts, 4);
  check(!lists.full_kv_num_blocks == !lists.full_kv_indices, value, op,
        ": full_kv_num_blocks and full_kv_indices must be given together");
  if (lists.full_kv_num_blocks) {
    check_list(op, "full_kv_num_blocks", lists.full_kv_num_blocks, counts, 3);
    check_list(op, "full_kv_indices", lists.full_kv_indices, counts, 4);
  }
  const int64_t b_count = counts.size(0), h_count = counts.size(1), rows = counts.size(2);
  check((b_count == 1 || b_count == args.batch()) && (h_count == 1 || h_count == args.heads()), value, op,
        ": the block mask must have B, H of ", args.batch(), " or 1, ", args.heads(), " or 1, got ", b_count, ", ",
        h_count);
  check(rows * lists.q_block >= args.q_length(), value, op, ": the block mask must cover q_len=", args.q_length(),
        ", got ", rows, " blocks of ", lists.q_block);
}

// The row reads and checks the lengths.
void check_sequences(std::string_view op, const AttentionForwardArgs& args) {
  check_cu_seqlens(op, args.cu_seqlens, "query", args.q, "[1, Hq, T, E]");
  check(args.q_length() == args.kv_length(), value, op, ": query and key must have the same tokens with cu_seqlens, got ",
        args.q_length(), " and ", args.kv_length());
  const int64_t room = args.mask && args.mask.rank == 4 ? args.mask.size(2) : 0;
  check_mask(op, args.mask, {1, args.heads(), room, room});
  check(!args.lse && !args.max_scores && args.dropout_p == 0 && !args.lists.kv_num_blocks, value, op,
        ": lse, max_scores, dropout and a block mask must not be given with cu_seqlens");
}

void check_forward(std::string_view op, AttentionForwardArgs& args) {
  args.place = place_of(op, {{"query", args.q}, {"key", args.k}, {"value", args.v}, {"out", args.out},
                             {"lse", args.lse}, {"max_scores", args.max_scores}, {"mask", args.mask},
                             {"sink", args.sink}, {"seed", args.seed}, {"kv_num_blocks", args.lists.kv_num_blocks},
                             {"kv_indices", args.lists.kv_indices},
                             {"full_kv_num_blocks", args.lists.full_kv_num_blocks},
                             {"full_kv_indices", args.lists.full_kv_indices}, {"cu_seqlens", args.cu_seqlens}});
  check_on(args.place, op, "score_captured", args.score_mod);
  check_on(args.place, op, "mask_captured", args.mask_mod);
  const TensorView &q = args.q, &k = args.k, &v = args.v, &out = args.out;
  for (const auto& [name, tensor] : {std::pair{"query", &q}, {"key", &k}, {"value", &v}})
    check(tensor->rank == 4, value, op, ": ", name, " must have shape [B, H, length, E], got ",
          shape_text(*tensor));
  check_floating(op, "query", q);
  const DType real = real_of(q.dtype);
  const int64_t batch = args.batch(), heads = args.heads(), length = args.q_length(), e = q.size(3), ev = v.size(3),
                kv_heads = args.kv_heads(), kv_length = args.kv_length();
  check(e >= 1 && ev >= 1, value, op, ": head dimensions must be at least 1, got E=", e, " Ev=", ev);
  check_heads(op, "query", q, q.dtype, {batch, heads, length, e});
  check_heads(op, "key", k, q.dtype, {batch, kv_heads, kv_length, e});
  check_heads(op, "value", v, q.dtype, {batch, kv_heads, kv_length, ev});
  check_groups(op, heads, kv_heads);
  check(std::max(length, kv_length) < INT32_MAX, value, op, ": lengths must be below 2^31 - 1, got ", length, " and ",
        kv_length);
  check_heads(op, "out", out, out.dtype == real ? real : q.dtype, {batch, heads, length, ev});
  check_statistic(op, "lse", args.lse, real, {batch, heads, length});
  check_statistic(op, "max_scores", args.max_scores, real, {batch, heads, length});
  check_statistic(op, "sink", args.sink, real, {heads});
  if (args.cu_seqlens) check_sequences(op, args);
  else check_mask(op, args.mask, {batch, heads, length, kv_length});
  check_lists(op, args);
  const TensorView& seed = args.seed;
  check(!seed || (seed.dtype == DType::int64 && seed.numel() == 1), type, op, ": seed must be one int64, got ",
        name_of(seed.dtype), " ", shape_text(seed));
  check(std::isfinite(args.scale), value, op, ": scale must be finite, got ", args.scale);
  check(args.dropout_p >= 0 && args.dropout_p <= 1, value, op, ": dropout_p must be between 0 and 1, got ",
        args.dropout_p);
}

void check_captured_gradients(std::string_view op, const ScoreCall* call, std::span<const TensorView> gradients) {
  const int64_t count = call ? call->captured_count() : 0;
  check(static_cast<int64_t>(gradients.size()) == count, value, op,
        ": score_captured_grads must have one entry for each of ", count, " captured tensors, got ", gradients.size());
  for (int64_t i = 0; i < count; i++) {
    if (!gradients[i]) continue;
    const TensorView& tensor = call->captured()[i];
    check_floating(op, "a captured tensor with a gradient", tensor);
    check_dtype(op, "score_captured_grads", gradients[i], tensor.dtype);
    check_shape(op, "score_captured_grads", gradients[i], shape_text(tensor).sizes);
    check_contiguous(op, "score_captured_grads", gradients[i]);
  }
}

// Strides of a gradient must be those of a tensor that owns its elements; 0 only where no element would
// be written twice.
void check_gradient(std::string_view op, std::string_view name, const TensorView& gradient, const TensorView& like) {
  check_heads(op, name, gradient, like.dtype, {like.size(0), like.size(1), like.size(2), like.size(3)});
}

}  // namespace

TensorView stretched(TensorView mask, const TensorView& q, const TensorView& k) {
  const int64_t full[] = {q.shape[0], q.shape[1], q.shape[2], k.shape[2]};
  for (int i = 0; mask.rank == 4 && i < 4; i++)
    if (mask.shape[i] == 1 && full[i] != 1) mask.shape[i] = full[i], mask.stride[i] = 0;
  return mask;
}

TensorView stretched(TensorView mask, int64_t heads) {
  if (mask.rank == 4 && mask.shape[1] == 1 && heads != 1) mask.shape[1] = heads, mask.stride[1] = 0;
  return mask;
}

void check_args(AttentionForwardArgs& args) { check_forward("attention_forward", args); }

void check_args(AttentionBackwardArgs& args) {
  constexpr std::string_view op = "attention_backward";
  AttentionForwardArgs& forward = args.forward;
  check_forward(op, forward);
  // Before devices are compared: the gradient of an argument that is None would be a CPU tensor.
  check(!args.grad_mask || (forward.mask && forward.mask.dtype != DType::boolean), value, op,
        ": grad_mask must be None without a floating mask");
  check(!args.grad_sink || forward.sink, value, op, ": grad_sink must be None without a sink");
  args.place = place_of(op, {{"query", forward.q}, {"grad_out", args.grad_out}, {"grad_lse", args.grad_lse},
                             {"grad_q", args.grad_q}, {"grad_k", args.grad_k}, {"grad_v", args.grad_v},
                             {"grad_mask", args.grad_mask}, {"grad_sink", args.grad_sink}});
  check_on(args.place, op, "score_captured_grads", args.grad_captured);
  const DType real = real_of(forward.q.dtype);
  const int64_t batch = forward.batch(), heads = forward.heads(), length = forward.q_length();
  check(static_cast<bool>(forward.lse), type, op, ": lse must be given");
  check_gradient(op, "grad_out", args.grad_out, forward.out);
  check_gradient(op, "grad_q", args.grad_q, forward.q);
  check_gradient(op, "grad_k", args.grad_k, forward.k);
  check_gradient(op, "grad_v", args.grad_v, forward.v);
  check_statistic(op, "grad_lse", args.grad_lse, real, {batch, heads, length});
  check_statistic(op, "grad_sink", args.grad_sink, real, {heads});
  if (args.grad_mask) {
    check_dtype(op, "grad_mask", args.grad_mask, real);
    check_shape(op, "grad_mask", args.grad_mask, {batch, heads, length, forward.kv_length()});
  }
  if (args.wants_captured()) check_captured_gradients(op, forward.score_mod, args.grad_captured);
}

void attention_forward(const AttentionForwardArgs& args) {
  if (args.out.numel() > 0) run(args);
}
void attention_backward(const AttentionBackwardArgs& args) { run(args); }

namespace {

// Number of scores that causality does not mask. Blocks that a block mask skips are unknown here: its lists are
// on the device.
int64_t pairs(const AttentionForwardArgs& args) {
  const int64_t rows = args.q_length(), keys = args.kv_length(), full = std::max<int64_t>(rows - keys, 0);
  const int64_t triangle = rows - full;
  return args.batch() * args.heads() * (args.causal ? triangle * (triangle + 1) / 2 + full * keys : rows * keys);
}

}  // namespace

// Two matrix products: scores and values.
Call describe(const AttentionForwardArgs& args) {
  const TensorView &q = args.q, &k = args.k, &v = args.v, &out = args.out;
  return Call{.arithmetic = Arithmetic::floating,
              .read = bytes_of(q) + bytes_of(k) + bytes_of(v) + bytes_of(args.mask),
              .written = bytes_of(out) + bytes_of(args.lse) + bytes_of(args.max_scores),
              .operations = 2 * pairs(args) * (q.size(3) + out.size(3))}
      .with(q, k, out);
}

// Five matrix products: scores; gradients of probabilities, values, queries and keys.
Call describe(const AttentionBackwardArgs& args) {
  const AttentionForwardArgs& forward = args.forward;
  return Call{.arithmetic = Arithmetic::floating,
              .read = bytes_of(forward.q) + bytes_of(forward.k) + bytes_of(forward.v) + bytes_of(forward.out) +
                      bytes_of(forward.lse) + bytes_of(forward.mask) + bytes_of(args.grad_out),
              .written = bytes_of(args.grad_q) + bytes_of(args.grad_k) + bytes_of(args.grad_v) +
                         bytes_of(args.grad_mask),
              .operations = 2 * pairs(forward) * (3 * forward.q.size(3) + 2 * forward.out.size(3))}
      .with(forward.q, forward.k, args.grad_out);
}

}  // namespace lowbit
