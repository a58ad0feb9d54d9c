// SPDX-License-Identifier: Apache-2.0
#include "ops/attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

#include "ops/decode.hpp"
#include "ops/score_gradient.hpp"
#include "ops/score_program.hpp"

namespace lowbit {

using enum ErrorKind;

namespace {

std::string shape_text(std::initializer_list<int64_t> shape) {
  std::string text;
  for (int64_t size : shape) text += concat(text.empty() ? "[" : ", ", size);
  return text + "]";
}

void check_shape(std::string_view op, std::string_view name, const TensorView& tensor, std::initializer_list<int64_t> shape) {
  const bool fits = tensor.rank == static_cast<int>(shape.size()) && std::equal(shape.begin(), shape.end(), tensor.shape.begin());
  check(fits, value, op, ": ", name, " must have shape ", shape_text(shape), ", got ", lowbit::shape_text(tensor));
}

void check_dense_rows(std::string_view op, std::string_view name, const TensorView& tensor) {
  check(tensor.size(-1) <= 1 || tensor.stride[tensor.rank - 1] == 1 || tensor.numel() == 0, value, op, ": ", name,
        " must be dense in its last dimension, got stride ", tensor.stride[tensor.rank - 1]);
}

void check_dtype(std::string_view op, std::string_view name, const TensorView& tensor, DType wanted) {
  check(tensor.dtype == wanted, type, op, ": ", name, " must be ", name_of(wanted), ", got ", name_of(tensor.dtype));
}

// A tensor of q's shape class: 4-d, dtype of q, dense rows.
void check_heads(std::string_view op, std::string_view name, const TensorView& tensor, DType dtype, std::initializer_list<int64_t> shape) {
  check_dtype(op, name, tensor, dtype);
  check_shape(op, name, tensor, shape);
  check_dense_rows(op, name, tensor);
}

void check_statistic(std::string_view op, std::string_view name, const TensorView& tensor, DType real, std::initializer_list<int64_t> shape) {
  if (!tensor) return;
  check_dtype(op, name, tensor, real);
  check_shape(op, name, tensor, shape);
  check(tensor.is_contiguous(), value, op, ": ", name, " must be contiguous");
}

void check_forward(std::string_view op, const AttentionForwardArgs& args) {
  const auto& [place, q, k, v, out, lse, max_scores, mask, sink, scale, causal, dropout_p, seed, score_mod, mask_mod, blocks] = args;
  for (const auto& [name, tensor] : {std::pair{"q", &q}, {"k", &k}, {"v", &v}})
    check(tensor->rank == 4, value, op, ": ", name, " must have shape [B, H, length, E], got ", lowbit::shape_text(*tensor));
  check(is_activation(q.dtype) || q.dtype == DType::float64, type, op, ": q must be float32, bfloat16, float16 or float64, got ",
        name_of(q.dtype));
  const int64_t batch = q.size(0), heads = q.size(1), length = q.size(2), e = q.size(3), kv_heads = k.size(1), kv_length = k.size(2);
  check(e >= 1 && v.size(3) >= 1, value, op, ": head dimensions must be at least 1, got E=", e, " Ev=", v.size(3));
  check_heads(op, "q", q, q.dtype, {batch, heads, length, e});
  check_heads(op, "k", k, q.dtype, {batch, kv_heads, kv_length, e});
  check_heads(op, "v", v, q.dtype, {batch, kv_heads, kv_length, v.size(3)});
  check(heads == 0 ? true : kv_heads > 0 && heads % kv_heads == 0, value, op, ": the heads of q must be a multiple of those of k, got ", heads,
        " and ", kv_heads);
  check(std::max(length, kv_length) < INT32_MAX, value, op, ": lengths must be below 2^31 - 1, got ", length, " and ", kv_length);
  check_heads(op, "out", out, out.dtype == real_of(q.dtype) ? out.dtype : q.dtype, {batch, heads, length, v.size(3)});
  check_statistic(op, "lse", lse, real_of(q.dtype), {batch, heads, length});
  check_statistic(op, "max_scores", max_scores, real_of(q.dtype), {batch, heads, length});
  check_statistic(op, "sink", sink, real_of(q.dtype), {heads});
  if (mask) {
    const bool floating = is_activation(mask.dtype) || mask.dtype == DType::float64;
    check(floating || mask.dtype == DType::boolean, type, op, ": mask must be bool or floating, got ", name_of(mask.dtype));
    check_shape(op, "mask", mask, {batch, heads, length, kv_length});
  }
  check(std::isfinite(scale), value, op, ": scale must be finite, got ", scale);
  check(dropout_p >= 0 && dropout_p <= 1, value, op, ": dropout_p must be between 0 and 1, got ", dropout_p);
}

void check_list(std::string_view op, std::string_view name, const TensorView& tensor, const TensorView& like, int rank) {
  check_dtype(op, name, tensor, DType::int32);
  check(tensor.rank == rank && std::equal(tensor.shape.begin(), tensor.shape.begin() + 3, like.shape.begin()), value, op, ": ", name,
        " must have ", rank, " dimensions and the leading sizes of kv_num_blocks ", lowbit::shape_text(like), ", got ",
        lowbit::shape_text(tensor));
}

int64_t element(const TensorView& tensor, int64_t b, int64_t h, int64_t row, int64_t i) {
  return tensor.as<const int32_t>()[b * tensor.stride[0] + h * tensor.stride[1] + row * tensor.stride[2] + i * tensor.stride[3]];
}

// The lists as one class per block: every entry is read and checked here, and kernels need not care for order or direction.
std::vector<BlockClass> block_classes(std::string_view op, AttentionForwardArgs& args, const BlockLists& lists) {
  if (!lists.kv_num_blocks) return {};
  const TensorView& counts = lists.kv_num_blocks;
  check(lists.q_block >= 1 && lists.kv_block >= 1, value, op, ": block_size must be positive, got (", lists.q_block, ", ", lists.kv_block, ")");
  check(counts.rank == 3, value, op, ": kv_num_blocks must have shape [B, H, q blocks], got ", lowbit::shape_text(counts));
  check_list(op, "kv_num_blocks", counts, counts, 3);
  check_list(op, "kv_indices", lists.kv_indices, counts, 4);
  check(!lists.full_kv_num_blocks == !lists.full_kv_indices, value, op, ": full_kv_num_blocks and full_kv_indices must be given together");
  if (lists.full_kv_num_blocks) {
    check_list(op, "full_kv_num_blocks", lists.full_kv_num_blocks, counts, 3);
    check_list(op, "full_kv_indices", lists.full_kv_indices, counts, 4);
  }
  const int64_t b_count = counts.size(0), h_count = counts.size(1), rows = counts.size(2);
  const int64_t columns = (args.kv_length() + lists.kv_block - 1) / lists.kv_block;
  check((b_count == 1 || b_count == args.batch()) && (h_count == 1 || h_count == args.heads()), value, op,
        ": the block mask must have B, H of ", args.batch(), " or 1, ", args.heads(), " or 1, got ", b_count, ", ", h_count);
  check(rows * lists.q_block >= args.q_length(), value, op, ": the block mask must cover q_len=", args.q_length(), ", got ", rows,
        " blocks of ", lists.q_block);
  std::vector<BlockClass> classes(b_count * h_count * rows * columns, BlockClass::empty);
  BlockClass* row = classes.data();
  for (int64_t b = 0; b < b_count; b++)
    for (int64_t h = 0; h < h_count; h++)
      for (int64_t i = 0; i < rows; i++, row += columns)
        for (const auto& [name, count, indices, what] : {std::tuple{"kv_indices", &counts, &lists.kv_indices, BlockClass::partial},
                                                         {"full_kv_indices", &lists.full_kv_num_blocks, &lists.full_kv_indices, BlockClass::full}}) {
          if (!*count) continue;
          const int64_t n = element(*count, b, h, i, 0);
          check(n >= 0 && n <= indices->size(3), value, op, ": a block count must be 0..", indices->size(3), ", got ", n);
          for (int64_t j = 0; j < n; j++) {
            const int64_t at = element(*indices, b, h, i, j);
            check(at >= 0 && at < columns, value, op, ": ", name, " must be 0..", columns - 1, " for kv_len=", args.kv_length(), ", got ", at);
            row[at] = what;
          }
        }
  args.blocks = {.classes = classes.data(), .batch_stride = b_count > 1 ? h_count * rows * columns : 0,
                 .head_stride = h_count > 1 ? rows * columns : 0, .columns = columns, .q_block = lists.q_block, .kv_block = lists.kv_block};
  return classes;  // its memory does not move
}

void check_faults(const AttentionForwardArgs& args) {
  for (const ScoreCall* call : {args.score_mod, args.mask_mod})
    if (call) call->check_fault();
}

void check_captured_gradients(std::string_view op, const ScoreCall* call, std::span<const TensorView> gradients) {
  const int64_t count = call ? call->captured_count() : 0;
  check(static_cast<int64_t>(gradients.size()) == count, value, op, ": score_captured_grads must have one entry for each of ", count,
        " captured tensors, got ", gradients.size());
  for (int64_t i = 0; i < count; i++) {
    if (!gradients[i]) continue;
    const TensorView& tensor = call->captured()[i];
    check(is_activation(tensor.dtype) || tensor.dtype == DType::float64, type, op, ": a captured tensor with a gradient must be floating, got ",
          name_of(tensor.dtype));
    check_dtype(op, "score_captured_grads", gradients[i], tensor.dtype);
    check(gradients[i].rank == tensor.rank && std::equal(tensor.shape.begin(), tensor.shape.begin() + tensor.rank, gradients[i].shape.begin()), value,
          op, ": score_captured_grads must have shape ", lowbit::shape_text(tensor), ", got ", lowbit::shape_text(gradients[i]));
    check(gradients[i].is_contiguous(), value, op, ": score_captured_grads must be contiguous");
  }
}

// What is left of a gradient where no query looks: nothing.
void clear(const TensorView& gradient) {
  if (!gradient || gradient.numel() == 0) return;
  const int64_t size = static_cast<int64_t>(size_of(gradient.dtype)), columns = gradient.rank ? gradient.size(-1) : 1;
  for (int64_t row = 0; row < gradient.numel() / columns; row++) {
    int64_t at = 0, rest = row;
    for (int dim = gradient.rank - 2; dim >= 0; dim--) {
      at += rest % gradient.shape[dim] * gradient.stride[dim];
      rest /= gradient.shape[dim];
    }
    std::memset(gradient.as<char>() + at * size, 0, columns * size);
  }
}

// Strides of a gradient may be 0 only where nothing is stored twice: it must have the strides of a tensor that owns its elements.
void check_gradient(std::string_view op, std::string_view name, const TensorView& gradient, const TensorView& like) {
  check_heads(op, name, gradient, like.dtype, {like.size(0), like.size(1), like.size(2), like.size(3)});
}

}  // namespace

void attention_forward(AttentionForwardArgs args, const BlockLists& lists) {
  constexpr std::string_view op = "attention_forward";
  check_forward(op, args);
  const std::vector<BlockClass> classes = block_classes(op, args, lists);
  if (args.out.numel() == 0) return;
  run(args);
  check_faults(args);
}

void attention_backward(AttentionBackwardArgs args, const BlockLists& lists, std::span<const TensorView> captured_gradients) {
  constexpr std::string_view op = "attention_backward";
  AttentionForwardArgs& forward = args.forward;
  check_forward(op, forward);
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
    check(forward.mask && forward.mask.dtype != DType::boolean, value, op, ": grad_mask must be None without a floating mask");
    check_dtype(op, "grad_mask", args.grad_mask, real);
    check_shape(op, "grad_mask", args.grad_mask, {batch, heads, length, forward.kv_length()});
  }
  const std::vector<BlockClass> classes = block_classes(op, forward, lists);
  std::optional<ScoreGradientPlan> plan;
  if (std::any_of(captured_gradients.begin(), captured_gradients.end(), [](const TensorView& view) { return static_cast<bool>(view); })) {
    check_captured_gradients(op, forward.score_mod, captured_gradients);
    const Tiling tiles(length, forward.blocks.q_block, kBackwardQTile);
    plan.emplace(*forward.score_mod, ScoreGradientShape{batch, heads, tiles.count},
                 std::vector<TensorView>(captured_gradients.begin(), captured_gradients.end()), real);
    args.captured = &*plan;
  }
  if (forward.out.numel() == 0) {  // no tile, no heads to divide by
    for (const TensorView& gradient : {args.grad_q, args.grad_k, args.grad_v, args.grad_sink}) clear(gradient);
    for (const TensorView& gradient : captured_gradients) clear(gradient);
    return;
  }
  run(args);
  check_faults(forward);
  if (plan) plan->finish();
}

}  // namespace lowbit
