// SPDX-License-Identifier: Apache-2.0
// Rows of the ops attention_forward and attention_backward. The host reads no data: block lists and indices of mods are
// checked on the device, where one out of range ends the launch with an error.
#include <cmath>

#include "cuda/attention/forward.hpp"
#include "cuda/attention/kind.hpp"
#include "cuda/attention/mods.hpp"
#include "cuda/backend.hpp"
#include "cuda/runtime/driver.hpp"
#include "gpu/attention/make_call.hpp"
#include "ops/aligned_rows.hpp"

namespace lowbit::cuda {
namespace {

// The workspace of a call.
struct WorkspaceLayout {
  int64_t fault = 16, classes = 0, statistics = 0, unit = 0, grad_out = 0, captured = 0;  // bytes
  int64_t at_statistics() const { return fault + round_up(classes, 16); }
  int64_t at_unit() const { return at_statistics() + round_up(statistics, 16); }
  int64_t at_grad_out() const { return at_unit() + round_up(unit, 16); }
  int64_t at_captured() const { return at_grad_out() + round_up(grad_out, 16); }
  int64_t all() const { return at_captured() + captured; }
};

AttentionCall call_of(const AttentionForwardArgs& args, const Workspace& workspace, int q_tile, int kv_tile) {
  auto* classes = static_cast<uint8_t*>(workspace.at(WorkspaceLayout().fault));
  auto call = attention_call<CapturedCall>(args, q_tile, kv_tile, classes);
  call.score = captured_of(args.score_mod), call.mask = captured_of(args.mask_mod);
  call.fault = static_cast<int32_t*>(workspace.at(0));
  return call;
}

// The program with one kernel of a call.
struct Launcher {
  const Place& place;
  const AttentionKind& kind;
  const AttentionCall& call;

  void operator()(AttentionKernel kernel, const char* name, int64_t ctas, int shared_bytes = 0,
                  int threads = kAttentionThreads) const {
    if (ctas == 0) return;
    program(place, kind.key(kernel), [&] { return attention_source(kind, kernel); })
        .launch(place, name, ctas, threads, &call, shared_bytes);
  }
};

void prepare(const AttentionForwardArgs& args, const Launcher& launch) {
  if (args.lists.kv_num_blocks || args.score_mod || args.mask_mod)
    launch(AttentionKernel::prepare, "prepare", args.lists.kv_num_blocks ? args.lists.kv_num_blocks.numel() : 1);
}

template <class Shape>
void launch_forward(const AttentionForwardArgs& args, const ForwardPart& part, const AttentionKind& kind,
                    const Shape& shape, AttentionKernel kernel, const char* name) {
  const Workspace workspace("attention_forward", args.place, WorkspaceLayout{.classes = class_count(args)}.all());
  AttentionCall call = call_of(args, workspace, shape.q_tile(), shape.kv_tile);
  call.position = static_cast<int32_t>(part.position), call.window = static_cast<int32_t>(part.window);
  call.first_head = static_cast<int32_t>(part.first_head), call.launched_heads = static_cast<int32_t>(part.heads);
  const Launcher launch{args.place, kind, call};
  prepare(args, launch);
  const int64_t tasks = part.heads * call.q_tiles.count,
                ctas = shape.kPersists ? smaller(tasks, multiprocessors(args.place.device)) : tasks;
  launch(kernel, name, ctas, shape.bytes(), shape.kThreads);
}

ForwardPart whole(const AttentionForwardArgs& args) { return {.heads = args.batch() * args.heads()}; }
void run_tiles(const AttentionForwardArgs& args, const ForwardPart& part) {
  const AttentionKind kind = kind_of(args);
  launch_forward(args, part, kind, kind.forward(), AttentionKernel::forward, "attention_forward");
}
void run_tiles(const AttentionForwardArgs& args) { run_tiles(args, whole(args)); }
void run_wgmma(const AttentionForwardArgs& args) {
  const AttentionKind kind = kind_of(args);
  launch_forward(args, whole(args), kind, kind.forward_wgmma(), AttentionKernel::forward_wgmma,
                 "attention_forward_wgmma");
}

AttentionCall backward_call(const AttentionBackwardArgs& args, const Workspace& workspace,
                            const WorkspaceLayout& layout, int q_tile, int kv_tile) {
  const AttentionForwardArgs& forward = args.forward;
  AttentionCall call = call_of(forward, workspace, q_tile, kv_tile);
  call.grad_q = rows_of(args.grad_q), call.grad_k = rows_of(args.grad_k), call.grad_v = rows_of(args.grad_v);
  call.grad_lse = args.grad_lse.as<const float>(), call.grad_sink = args.grad_sink.as<float>();
  call.statistics = static_cast<RowStatistics*>(workspace.at(layout.at_statistics()));
  call.unit = static_cast<float*>(workspace.at(layout.at_unit()));
  call.given = call.grad_out = rows_of(args.grad_out);
  if (args.grad_out.dtype == forward.q.dtype) return call;
  const int64_t ev = forward.ev(), length = forward.q_length();
  call.grad_out = {workspace.at(layout.at_grad_out()), forward.heads() * length * ev, length * ev, ev};
  return call;
}

// CTAs that add to the same address wait for each other.
int64_t copies_of(const TensorView& gradient) { return gradient.numel() <= 1024 ? 64 : 1; }

int64_t captured_bytes(const AttentionBackwardArgs& args) {
  if (!args.wants_captured()) return 0;
  int64_t bytes = kMaxCaptured * 4;
  for (const TensorView& gradient : args.grad_captured)
    if (gradient) bytes += copies_of(gradient) * gradient.numel() * static_cast<int64_t>(sizeof(ExactSum));
  return bytes;
}

// One pass to find the largest value, one to add them all.
void differentiate_captured(const AttentionBackwardArgs& args, const AttentionKind& kind, AttentionCall call,
                            char* memory) {
  const AttentionForwardArgs& forward = args.forward;
  call.largest = reinterpret_cast<uint32_t*>(memory);
  auto* sums = reinterpret_cast<ExactSum*>(memory + kMaxCaptured * 4);
  int64_t most = 0;
  for (std::size_t i = 0; i < args.grad_captured.size(); i++) {
    const TensorView& gradient = args.grad_captured[i];
    if (!gradient) continue;
    call.gradients[i] = {sums, gradient.data, gradient.numel(), copies_of(gradient), gradient.dtype};
    sums += call.gradients[i].copies * call.gradients[i].count, most = larger(most, gradient.numel());
  }
  const int64_t ctas = forward.batch() * forward.heads() * call.q_tiles.count;
  const double steps = static_cast<double>(forward.score_mod->program().backward.steps.size()),
               adds = static_cast<double>(forward.batch() * forward.heads() * forward.q_length()) *
                      static_cast<double>(forward.kv_length()) * steps;  // max terms per element
  call.sum_bits = 61 - (adds > 1 ? std::ilogb(adds) : 0);
  const Launcher launch{args.place, kind, call};
  launch(AttentionKernel::captured_ends, "captured_start", larger(1, ceil_div(most, kAttentionThreads)));
  for (const bool adds : {false, true})
    call.adds = adds, launch(AttentionKernel::captured, "attention_captured", ctas, kind.backward().bytes());
  launch(AttentionKernel::captured_ends, "captured_finish", larger(1, ceil_div(most, kAttentionThreads)));
}

template <class Shape>
struct Passes {
  AttentionKernel kernel;
  Shape of_queries, of_keys;
  const char *queries, *keys;  // names of kernels
};

template <class Shape>
void launch_backward(const AttentionBackwardArgs& args, const AttentionKind& kind, const Passes<Shape>& passes) {
  const Shape &of_queries = passes.of_queries, &of_keys = passes.of_keys;
  const AttentionForwardArgs& forward = args.forward;
  const BackwardShape tiles = kind.backward();
  const int64_t heads = forward.batch() * forward.heads(), kv_heads = forward.batch() * forward.kv_heads(),
                rows = heads * forward.q_length();
  const WorkspaceLayout layout{.classes = class_count(forward),
                               .statistics = rows * static_cast<int64_t>(sizeof(RowStatistics)),
                               .unit = rows * 4,
                               .grad_out = args.grad_out.dtype == forward.q.dtype ? 0 : rows * forward.ev() * 2,
                               .captured = captured_bytes(args)};
  const Workspace workspace("attention_backward", args.place, layout.all());
  const AttentionCall by_keys = backward_call(args, workspace, layout, of_keys.passing, of_keys.kStaying),
                      by_queries = backward_call(args, workspace, layout, of_queries.kStaying, of_queries.passing);
  const auto by_tiles = [&] { return backward_call(args, workspace, layout, tiles.kStaying, tiles.passing); };
  const Launcher launch_keys{args.place, kind, by_keys}, launch_queries{args.place, kind, by_queries};
  prepare(forward, launch_queries);
  launch_queries(AttentionKernel::statistics, "row_statistics", ceil_div(rows, kAttentionWarps));
  if (passes.kernel == AttentionKernel::backward_wgmma) {
    const AttentionCall of_units = by_tiles();
    Launcher{args.place, kind, of_units}(passes.kernel, "attention_units", heads * of_units.q_tiles.count,
                                         tiles.bytes());
  }
  launch_queries(passes.kernel, passes.queries, heads * by_queries.q_tiles.count * of_queries.parts,
                 of_queries.bytes(), Shape::kThreads);
  launch_keys(passes.kernel, passes.keys, kv_heads * by_keys.kv_tiles.count * of_keys.parts, of_keys.bytes(),
              Shape::kThreads);
  if (args.grad_sink) launch_queries(AttentionKernel::sink, "sink_gradient", forward.heads());
  if (args.wants_captured())
    differentiate_captured(args, kind, by_tiles(), static_cast<char*>(workspace.at(layout.at_captured())));
}
void run_backward(const AttentionBackwardArgs& args) {
  const AttentionKind kind = kind_of(args.forward);
  const Passes<BackwardShape> passes{AttentionKernel::backward, kind.backward(), kind.backward(), "attention_queries",
                                     "attention_keys"};
  launch_backward(args, kind, passes);
}
void run_backward_wgmma(const AttentionBackwardArgs& args) {
  const AttentionKind kind = kind_of(args.forward);
  const Passes<WgmmaBackwardShape> passes{AttentionKernel::backward_wgmma, kind.backward_wgmma(false),
                                          kind.backward_wgmma(true), "attention_queries_wgmma",
                                          "attention_keys_wgmma"};
  launch_backward(args, kind, passes);
}

bool fits_head_dim(int64_t e) { return e % 16 == 0 && e <= kMaxHeadDim; }

// Rows are copied 16 bytes at a time.
bool is_aligned(const TensorView& tensor) { return has_aligned_rows(tensor, 16); }

}  // namespace

std::string_view refuses_forward(const AttentionForwardArgs& args) {
  if (args.q.dtype != DType::bfloat16 && args.q.dtype != DType::float16)
    return "inputs are neither bfloat16 nor float16";
  if (args.cu_seqlens) return kPackedSequences;
  if (!fits_head_dim(args.q.size(3)) || !fits_head_dim(args.ev()))
    return "head dims must be multiples of 16, at most 256";
  if (!is_aligned(args.q) || !is_aligned(args.k) || !is_aligned(args.v) || !is_aligned(args.out))
    return "rows of q, k and v must begin at multiples of 16 bytes";
  if (!fits(args.score_mod) || !fits(args.mask_mod)) return kCapturesTooMuch;
  if (args.batch() * args.heads() * args.q_length() >= INT32_MAX || class_count(args) >= INT32_MAX)
    return "more than 2^31 rows or blocks";
  return "";
}

namespace {

std::string_view refuses_wgmma(const AttentionForwardArgs& args) {
  if (const std::string_view reason = refuses_forward(args); !reason.empty()) return reason;
  if (capability(args.place.device) != 90) return "a GPU of another compute capability than 9.0";
  if (args.q.size(3) > 128) return "head dims of queries above 128";
  if (args.ev() != 64 && args.ev() != 128) return "head dims of values that are neither 64 nor 128";
  if (args.ev() == 64 && kind_of(args).gathers() != Gathers::none)
    return "a mod that gathers, and head dims of values of 64: tiles take 0.9 of its time";
  const BlockLists& lists = args.lists;
  if (lists.kv_num_blocks &&
      (lists.q_block < WgmmaForwardShape::q_tile() || lists.kv_block < kind_of(args).forward_wgmma().kv_tile))
    return "blocks smaller than its tiles";
  return "";
}

}  // namespace

void run_prompt(const AttentionForwardArgs& args, const ForwardPart& part) {
  if (!refuses_wgmma(args).empty()) return run_tiles(args, part);
  const AttentionKind kind = kind_of(args);
  launch_forward(args, part, kind, kind.prompt_wgmma(), AttentionKernel::prompt_wgmma, "attention_prompt_wgmma");
}

namespace {

std::string_view refuses_backward(const AttentionBackwardArgs& args) {
  if (args.grad_mask) return "a gradient of mask is wanted";
  for (const TensorView& tensor : {args.grad_out, args.grad_q, args.grad_k, args.grad_v})
    if (!is_aligned(tensor)) return "rows of gradients must begin at multiples of 16 bytes";
  return refuses_forward(args.forward);
}

std::string_view refuses_backward_wgmma(const AttentionBackwardArgs& args) {
  if (const std::string_view reason = refuses_backward(args); !reason.empty()) return reason;
  const AttentionForwardArgs& forward = args.forward;
  if (capability(args.place.device) != 90) return "a GPU of another compute capability than 9.0";
  for (const int64_t e : {forward.q.size(3), forward.ev()})
    if (e != 64 && e != 128) return "head dims that are neither 64 nor 128";
  if (kind_of(forward).gathers() == Gathers::by_score) return "a score_mod that gathers: its tiles take all registers";
  constexpr int kStaying = WgmmaBackwardShape::kStaying;
  const BlockLists& lists = forward.lists;
  if (lists.kv_num_blocks && (lists.q_block < kStaying || lists.kv_block < kStaying))
    return "blocks smaller than its tiles";
  return "";
}

constexpr Kernel<AttentionForwardArgs> kForward[] = {
    {"attention_forward_wgmma_cuda", refuses_wgmma, run_wgmma},
    {"attention_forward_tiles_cuda", refuses_forward, run_tiles},
};
constexpr Kernel<AttentionBackwardArgs> kBackward[] = {
    {"attention_backward_wgmma_cuda", refuses_backward_wgmma, run_backward_wgmma},
    {"attention_backward_tiles_cuda", refuses_backward, run_backward},
};

}  // namespace

void add_attention_rows(Backend& backend) {
  add_rows(backend, kForward, std::size(kForward)), add_rows(backend, kBackward, std::size(kBackward));
}

}  // namespace lowbit::cuda
