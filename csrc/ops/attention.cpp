// SPDX-License-Identifier: Apache-2.0
#include "ops/attention.hpp"

#include <algorithm>
#include <cmath>

#include "ops/place.hpp"
#include "score/program.hpp"

namespace lowbit {

using enum ErrorKind;

namespace {

void check_shape(std::string_view op, std::string_view name, const TensorView& tensor,
                 std::initializer_list<int64_t> shape) {
  const bool fits =
      tensor.rank == static_cast<int>(shape.size()) && std::equal(shape.begin(), shape.end(), tensor.shape.begin());
  check(fits, value, op, ": ", name, " must have shape ", shape_text(shape), ", got ", shape_text(tensor));
}

void check_dense_rows(std::string_view op, std::string_view name, const TensorView& tensor) {
  check(tensor.size(-1) <= 1 || tensor.stride[tensor.rank - 1] == 1 || tensor.numel() == 0, value, op, ": ", name,
        " must be dense in its last dimension, got stride ", tensor.stride[tensor.rank - 1]);
}

void check_dtype(std::string_view op, std::string_view name, const TensorView& tensor, DType wanted) {
  check(tensor.dtype == wanted, type, op, ": ", name, " must be ", name_of(wanted), ", got ", name_of(tensor.dtype));
}

// A tensor of q's shape class: 4-d, dtype of q, dense rows.
void check_heads(std::string_view op, std::string_view name, const TensorView& tensor, DType dtype,
                 std::initializer_list<int64_t> shape) {
  check_dtype(op, name, tensor, dtype);
  check_shape(op, name, tensor, shape);
  check_dense_rows(op, name, tensor);
}

void check_statistic(std::string_view op, std::string_view name, const TensorView& tensor, DType real,
                     std::initializer_list<int64_t> shape) {
  if (!tensor) return;
  check_dtype(op, name, tensor, real);
  check_shape(op, name, tensor, shape);
  check(tensor.is_contiguous(), value, op, ": ", name, " must be contiguous");
}

void check_list(std::string_view op, std::string_view name, const TensorView& tensor, const TensorView& like,
                int rank) {
  check_dtype(op, name, tensor, DType::int32);
  check(tensor.rank == rank && std::equal(tensor.shape.begin(), tensor.shape.begin() + 3, like.shape.begin()), value,
        op, ": ", name, " must have ", rank, " dimensions and the leading sizes of kv_num_blocks ",
        shape_text(like), ", got ", shape_text(tensor));
}

// Shapes and dtypes; the entries are read and checked by the row.
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

void check_forward(std::string_view op, AttentionForwardArgs& args) {
  args.place = place_of(op, {{"q", args.q}, {"k", args.k}, {"v", args.v}, {"out", args.out}, {"lse", args.lse},
                             {"max_scores", args.max_scores}, {"mask", args.mask}, {"sink", args.sink},
                             {"seed", args.seed}, {"kv_num_blocks", args.lists.kv_num_blocks},
                             {"kv_indices", args.lists.kv_indices},
                             {"full_kv_num_blocks", args.lists.full_kv_num_blocks},
                             {"full_kv_indices", args.lists.full_kv_indices}});
  check_on(args.place, op, "score_captured", args.score_mod);
  check_on(args.place, op, "mask_captured", args.mask_mod);
  const auto& [place, q, k, v, out, lse, max_scores, mask, sink, scale, causal, dropout_p, seed, score_mod, mask_mod,
               lists, blocks, key, k_scale, v_scale, rotated, position, window] = args;
  for (const auto& [name, tensor] : {std::pair{"q", &q}, {"k", &k}, {"v", &v}})
    check(tensor->rank == 4, value, op, ": ", name, " must have shape [B, H, length, E], got ",
          shape_text(*tensor));
  check(is_activation(q.dtype) || q.dtype == DType::float64, type, op,
        ": q must be float32, bfloat16, float16 or float64, got ", name_of(q.dtype));
  const int64_t batch = q.size(0), heads = q.size(1), length = q.size(2), e = q.size(3), kv_heads = k.size(1),
                kv_length = k.size(2);
  check(e >= 1 && v.size(3) >= 1, value, op, ": head dimensions must be at least 1, got E=", e, " Ev=", v.size(3));
  check_heads(op, "q", q, q.dtype, {batch, heads, length, e});
  check_heads(op, "k", k, q.dtype, {batch, kv_heads, kv_length, e});
  check_heads(op, "v", v, q.dtype, {batch, kv_heads, kv_length, v.size(3)});
  check(heads == 0 ? true : kv_heads > 0 && heads % kv_heads == 0, value, op,
        ": the heads of q must be a multiple of those of k, got ", heads, " and ", kv_heads);
  check(std::max(length, kv_length) < INT32_MAX, value, op, ": lengths must be below 2^31 - 1, got ", length, " and ",
        kv_length);
  check_heads(op, "out", out, out.dtype == real_of(q.dtype) ? out.dtype : q.dtype, {batch, heads, length, v.size(3)});
  check_statistic(op, "lse", lse, real_of(q.dtype), {batch, heads, length});
  check_statistic(op, "max_scores", max_scores, real_of(q.dtype), {batch, heads, length});
  check_statistic(op, "sink", sink, real_of(q.dtype), {heads});
  if (mask) {
    const bool floating = is_activation(mask.dtype) || mask.dtype == DType::float64;
    check(floating || mask.dtype == DType::boolean, type, op, ": mask must be bool or floating, got ",
          name_of(mask.dtype));
    check_shape(op, "mask", mask, {batch, heads, length, kv_length});
  }
  check_lists(op, args);
  if (seed) {
    check(seed.dtype == DType::int64 && seed.numel() == 1, type, op, ": seed must be one int64, got ",
          name_of(seed.dtype), " ", shape_text(seed));
  }
  check(std::isfinite(scale), value, op, ": scale must be finite, got ", scale);
  check(dropout_p >= 0 && dropout_p <= 1, value, op, ": dropout_p must be between 0 and 1, got ", dropout_p);
}

void check_captured_gradients(std::string_view op, const ScoreCall* call, std::span<const TensorView> gradients) {
  const int64_t count = call ? call->captured_count() : 0;
  check(static_cast<int64_t>(gradients.size()) == count, value, op,
        ": score_captured_grads must have one entry for each of ", count, " captured tensors, got ", gradients.size());
  for (int64_t i = 0; i < count; i++) {
    if (!gradients[i]) continue;
    const TensorView& tensor = call->captured()[i];
    check(is_activation(tensor.dtype) || tensor.dtype == DType::float64, type, op,
          ": a captured tensor with a gradient must be floating, got ", name_of(tensor.dtype));
    check_dtype(op, "score_captured_grads", gradients[i], tensor.dtype);
    check(gradients[i].rank == tensor.rank &&
              std::equal(tensor.shape.begin(), tensor.shape.begin() + tensor.rank, gradients[i].shape.begin()),
          value, op, ": score_captured_grads must have shape ", shape_text(tensor), ", got ",
          shape_text(gradients[i]));
    check(gradients[i].is_contiguous(), value, op, ": score_captured_grads must be contiguous");
  }
}

// Strides of a gradient may be 0 only where nothing is stored twice: it must have the strides of a tensor that
// owns its elements.
void check_gradient(std::string_view op, std::string_view name, const TensorView& gradient, const TensorView& like) {
  check_heads(op, name, gradient, like.dtype, {like.size(0), like.size(1), like.size(2), like.size(3)});
}

}  // namespace

void attention_forward(AttentionForwardArgs args) {
  check_forward("attention_forward", args);
  if (args.out.numel() > 0) run(args);
}

void attention_backward(AttentionBackwardArgs args) {
  constexpr std::string_view op = "attention_backward";
  AttentionForwardArgs& forward = args.forward;
  check_forward(op, forward);
  args.place = place_of(op, {{"q", forward.q}, {"grad_out", args.grad_out}, {"grad_lse", args.grad_lse},
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
  check(!args.grad_sink || forward.sink, value, op, ": grad_sink must be None without a sink");
  if (args.grad_mask) {
    check(forward.mask && forward.mask.dtype != DType::boolean, value, op,
          ": grad_mask must be None without a floating mask");
    check_dtype(op, "grad_mask", args.grad_mask, real);
    check_shape(op, "grad_mask", args.grad_mask, {batch, heads, length, forward.kv_length()});
  }
  if (args.wants_captured()) check_captured_gradients(op, forward.score_mod, args.grad_captured);
  run(args);
}

namespace {

// Scores that are not masked by causality. What a block mask skips is not known here: its lists lie on the device.
int64_t pairs(const AttentionForwardArgs& args) {
  const int64_t rows = args.q_length(), keys = args.kv_length(), full = std::max<int64_t>(rows - keys, 0);
  const int64_t triangle = rows - full;
  return args.batch() * args.heads() * (args.causal ? triangle * (triangle + 1) / 2 + full * keys : rows * keys);
}

}  // namespace

// Two products: scores and values.
Call describe(const AttentionForwardArgs& args) {
  const TensorView &q = args.q, &k = args.k, &v = args.v, &out = args.out;
  Call call{.arithmetic = Arithmetic::floating,
            .read = bytes_of(q) + bytes_of(k) + bytes_of(v) + bytes_of(args.mask),
            .written = bytes_of(out) + bytes_of(args.lse) + bytes_of(args.max_scores),
            .operations = 2 * pairs(args) * (q.size(3) + out.size(3))};
  call.add(q), call.add(k), call.add(out);
  return call;
}

// Five products: scores, gradients of probabilities, of values, of queries and of keys.
Call describe(const AttentionBackwardArgs& args) {
  const AttentionForwardArgs& forward = args.forward;
  Call call{.arithmetic = Arithmetic::floating,
            .read = bytes_of(forward.q) + bytes_of(forward.k) + bytes_of(forward.v) + bytes_of(forward.out) +
                    bytes_of(forward.lse) + bytes_of(forward.mask) + bytes_of(args.grad_out),
            .written = bytes_of(args.grad_q) + bytes_of(args.grad_k) + bytes_of(args.grad_v) + bytes_of(args.grad_mask),
            .operations = 2 * pairs(forward) * (3 * forward.q.size(3) + 2 * forward.out.size(3))};
  call.add(forward.q), call.add(forward.k), call.add(args.grad_out);
  return call;
}

}  // namespace lowbit
