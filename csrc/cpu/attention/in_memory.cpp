// SPDX-License-Identifier: Apache-2.0
#include "cpu/attention/in_memory.hpp"

#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "core/parallel.hpp"
#include "cpu/attention/captured_gradients.hpp"
#include "cpu/packed_sequences.hpp"
#include "score/program.hpp"

namespace lowbit::cpu {
namespace {

using enum ErrorKind;

int64_t element(const TensorView& tensor, int64_t b, int64_t h, int64_t row, int64_t i) {
  return tensor
      .as<const int32_t>()[b * tensor.stride[0] + h * tensor.stride[1] + row * tensor.stride[2] + i * tensor.stride[3]];
}

// Converts the lists to one class per block. Every entry is read and checked here, so tiles may visit blocks
// in any order.
std::vector<BlockClass> read_lists(ForwardCall& args) {
  const BlockLists& lists = args.lists;
  if (!lists.kv_num_blocks) return {};
  constexpr std::string_view op = "attention";
  const int64_t b_count = lists.kv_num_blocks.size(0), h_count = lists.kv_num_blocks.size(1),
                rows = lists.kv_num_blocks.size(2);
  const int64_t columns = ceil_div(args.kv_length(), lists.kv_block);
  std::vector<BlockClass> classes(b_count * h_count * rows * columns, BlockClass::empty);
  BlockClass* row = classes.data();
  for (int64_t b = 0; b < b_count; b++)
    for (int64_t h = 0; h < h_count; h++)
      for (int64_t i = 0; i < rows; i++, row += columns)
        for (const auto& [name, count, indices, what] :
             {std::tuple{"kv_indices", &lists.kv_num_blocks, &lists.kv_indices, BlockClass::partial},
              {"full_kv_indices", &lists.full_kv_num_blocks, &lists.full_kv_indices, BlockClass::full}}) {
          if (!*count) continue;
          const int64_t n = element(*count, b, h, i, 0);
          check(n >= 0 && n <= indices->size(3), value, op, ": a block count must be 0..", indices->size(3), ", got ",
                n);
          for (int64_t j = 0; j < n; j++) {
            const int64_t at = element(*indices, b, h, i, j);
            check(at >= 0 && at < columns, value, op, ": ", name, " must be 0..", columns - 1,
                  " for kv_len=", args.kv_length(), ", got ", at);
            row[at] = what;
          }
        }
  args.blocks = {.classes = classes.data(),
                 .batch_stride = b_count > 1 ? h_count * rows * columns : 0,
                 .head_stride = h_count > 1 ? rows * columns : 0,
                 .columns = columns,
                 .q_block = lists.q_block,
                 .kv_block = lists.kv_block};
  return classes;  // a move keeps its address
}

// Zeros the elements that the view's strides reach, once each.
void clear(const TensorView& view, int dim = 0, int64_t at = 0) {
  if (!view) return;
  const int64_t size = static_cast<int64_t>(size_of(view.dtype));
  const int64_t count = dim == view.rank ? 1 : view.stride[dim] == 0 ? 1 : view.shape[dim];
  const bool last = dim == view.rank || (dim == view.rank - 1 && view.stride[dim] <= 1);
  if (last && count > 0) std::memset(view.as<char>() + at * size, 0, count * size);
  if (last) return;
  for (int64_t i = 0; i < count; i++) clear(view, dim + 1, at + i * view.stride[dim]);
}

template <class Args>
void begin_programs(const Args& args) {
  for (const ScoreCall* call : {args.score_mod, args.mask_mod})
    if (call) call->check_captured();
}
template <class Args>
void end_programs(const Args& args) {
  for (const ScoreCall* call : {args.score_mod, args.mask_mod})
    if (call) call->check_fault();
}

std::vector<BlockClass> read(ForwardCall& args) {
  begin_programs(args);
  if (args.seed) args.key = static_cast<uint64_t>(*args.seed.as<const int64_t>());
  return read_lists(args);
}

// The call of one of the packed sequences.
ForwardCall sequence_call(const ForwardCall& args, int64_t n) {
  const int64_t begin = end_in(args.cu_seqlens, n), tokens = end_in(args.cu_seqlens, n + 1) - begin;
  ForwardCall call = args;
  call.cu_seqlens = {};
  for (TensorView* tensor : {&call.q, &call.k, &call.v, &call.out}) {
    tensor->data = tensor->as<char>() + begin * tensor->stride[2] * static_cast<int64_t>(size_of(tensor->dtype));
    tensor->shape[2] = tokens;
  }
  if (call.mask) call.mask.shape[2] = call.mask.shape[3] = tokens;
  return call;
}

// Many sequences are divided among the threads, in one parallel region; of few, the tiles of each.
void run_sequences(const ForwardCall& args, void (*tiles)(const ForwardCall&)) {
  constexpr std::string_view op = "attention_forward";
  refuse_bad_lengths(op, args.cu_seqlens, "query", args.q_length());
  const int64_t sequences = args.cu_seqlens.size(0) - 1;
  for (int64_t n = 0; args.mask && n < sequences; n++)
    check(end_in(args.cu_seqlens, n + 1) - end_in(args.cu_seqlens, n) <= args.mask.size(2), value, op,
          ": mask must have as many rows as the longest sequence has tokens, got ", args.mask.size(2), " for ",
          end_in(args.cu_seqlens, n + 1) - end_in(args.cu_seqlens, n));
  constexpr int kPerThread = 4;
  const bool many = sequences >= kPerThread * num_threads();
  parallel_for(sequences, many ? num_threads() : 1, [&](int64_t n) {
    ForwardCall call = sequence_call(args, n);
    call.on_one_thread = many;
    if (call.q_length() > 0) tiles(call);
  });
}

}  // namespace

void with_memory(ForwardCall call, void (*tiles)(const ForwardCall&)) {
  const std::vector<BlockClass> classes = read(call);
  if (call.cu_seqlens) run_sequences(call, tiles);
  else tiles(call);
  end_programs(call);
}

void with_memory(const AttentionForwardArgs& args, void (*tiles)(const ForwardCall&)) {
  with_memory(ForwardCall{args}, tiles);
}

void with_memory(const AttentionBackwardArgs& given, void (*tiles)(const BackwardCall&)) {
  BackwardCall args{given, {given.forward}};
  ForwardCall& forward = args.forward;
  const std::vector<BlockClass> classes = read(forward);
  clear(args.grad_mask);
  std::optional<ScoreGradientPlan> plan;
  if (args.wants_captured()) {
    const Tiling tiling(forward.q_length(), forward.blocks.q_block, kBackwardQTile);
    plan.emplace(*forward.score_mod, ScoreGradientShape{forward.batch(), forward.heads(), tiling.count},
                 std::vector<TensorView>(args.grad_captured.begin(), args.grad_captured.end()),
                 real_of(forward.q.dtype));
    args.captured = &*plan;
  }
  if (forward.out.numel() == 0) {  // no tiles, and perhaps no heads to divide by
    for (const TensorView& gradient : {args.grad_q, args.grad_k, args.grad_v, args.grad_sink}) clear(gradient);
    for (const TensorView& gradient : args.grad_captured) clear(gradient);
    return;
  }
  tiles(args);
  end_programs(forward);
  if (plan) plan->finish();
}

void with_memory(const DecodeArgs& args, void (*splits)(const DecodeArgs&)) {
  begin_programs(args);
  splits(args);
  end_programs(args);
}

}  // namespace lowbit::cpu
