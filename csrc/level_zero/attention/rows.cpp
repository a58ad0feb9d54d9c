// SPDX-License-Identifier: Apache-2.0
// Rows of the ops attention_forward and attention_backward. Block lists and indices of mods are checked on the device;
// if there are any, the host waits for the result.
#include "gpu/attention/make_call.hpp"
#include "level_zero/attention/captured.hpp"
#include "level_zero/backend.hpp"

namespace lowbit::level_zero {
namespace {

using gpu::RowStatistics;

// The workspace of a call.
struct WorkspaceLayout {
  int64_t classes = 0, statistics = 0, unit = 0, captured = 0;  // bytes
  static constexpr int64_t at_classes() { return CallMods::kBytes; }
  int64_t at_statistics() const { return at_classes() + round_up(classes, 16); }
  int64_t at_unit() const { return at_statistics() + round_up(statistics, 16); }
  int64_t at_captured() const { return at_unit() + round_up(unit, 16); }
  int64_t all() const { return at_captured() + captured; }
};

bool may_fail(const AttentionForwardArgs& args) {
  return args.score_mod || args.mask_mod || args.lists.kv_num_blocks;
}

AttentionCall call_of(const AttentionForwardArgs& args, const Workspace& workspace, const CallMods& mods, int q_tile,
                      int kv_tile) {
  AttentionCall call{gpu::attention_call<ModTable>(args, q_tile, kv_tile,
                                                    static_cast<uint8_t*>(workspace.at(WorkspaceLayout::at_classes()))),
                     static_cast<int32_t>(args.q.size(3)), static_cast<int32_t>(args.ev()), args.q.dtype,
                     args.mask.dtype};
  call.score = mods.score(), call.mask = mods.mask(), call.fault = mods.fault();
  return call;
}

void launch(const Place& place, const Program& program, const char* kernel, int64_t groups, const AttentionCall& call) {
  if (groups) program.launch(place, kernel, groups, kAttentionThreads, &call, sizeof call);
}

void make_classes(const AttentionForwardArgs& args, const AttentionCall& call) {
  const TensorView& rows = args.lists.kv_num_blocks;
  if (rows) launch(args.place, program(args.place, "attention_prepare"), "make_classes", rows.numel(), call);
}

// lanes: sub-group size for dpas; 0: without dpas.
void run_forward(const AttentionForwardArgs& args, int lanes) {
  const int columns = kernel_columns(larger(args.q.size(3), args.ev())),
            q_tile = lanes ? DpasShape{columns, lanes}.q_tile() : ForwardShape{columns}.q_tile();
  const Workspace workspace("attention_forward", args.place, WorkspaceLayout{.classes = gpu::class_count(args)}.all());
  const CallMods mods(args.place, args.score_mod, args.mask_mod, workspace.at(0), may_fail(args));
  const AttentionCall call = call_of(args, workspace, mods, q_tile, kKvTile);
  make_classes(args, call);
  const int32_t constants[] = {args.q.dtype == DType::float16};  // in the order of products.hpp
  const Program& kernels =
      lanes == 8    ? mods.program("attention_forward_dpas8", "attention_forward_dpas8_mods", {constants})
      : lanes == 16 ? mods.program("attention_forward_dpas16", "attention_forward_dpas16_mods", {constants})
                    : mods.program("attention_forward", "attention_forward_mods");
  launch(args.place, kernels, kernel_of(columns, {"forward_64", "forward_128", "forward_256"}),
         args.batch() * args.heads() * call.q_tiles.count, call);
  mods.check_fault("attention_forward");
}
void run_forward_dpas(const AttentionForwardArgs& args) { run_forward(args, dpas_lanes(args.place)); }
void run_forward_tiles(const AttentionForwardArgs& args) { run_forward(args, 0); }

AttentionCall backward_call(const AttentionBackwardArgs& args, const Workspace& workspace,
                            const WorkspaceLayout& layout, const CallMods& mods, int q_tile, int kv_tile) {
  AttentionCall call = call_of(args.forward, workspace, mods, q_tile, kv_tile);
  call.grad_out = gpu::rows_of(args.grad_out), call.grad_q = gpu::rows_of(args.grad_q),
  call.grad_k = gpu::rows_of(args.grad_k), call.grad_v = gpu::rows_of(args.grad_v),
  call.grad_lse = args.grad_lse.as<const float>(), call.grad_sink = args.grad_sink.as<float>();
  call.statistics = static_cast<RowStatistics*>(workspace.at(layout.at_statistics()));
  call.unit = static_cast<float*>(workspace.at(layout.at_unit()));
  return call;
}

void run_backward(const AttentionBackwardArgs& args) {
  const AttentionForwardArgs& forward = args.forward;
  const int columns = kernel_columns(larger(forward.q.size(3), forward.ev())), tile = BackwardShape{columns}.tile();
  const int64_t heads = forward.batch() * forward.heads(), rows = heads * forward.q_length();
  const WorkspaceLayout layout{.classes = gpu::class_count(forward),
                               .statistics = rows * static_cast<int64_t>(sizeof(RowStatistics)), .unit = rows * 4,
                               .captured = CapturedGradients::bytes(args)};
  const Workspace workspace("attention_backward", forward.place, layout.all());
  const CallMods mods(forward.place, forward.score_mod, forward.mask_mod, workspace.at(0), may_fail(forward));
  const AttentionCall by_queries = backward_call(args, workspace, layout, mods, tile, kKvTile),
                      by_keys = backward_call(args, workspace, layout, mods, kKvTile, tile);
  const Program &kernels = mods.program("attention_backward", "attention_backward_mods"),
                &of_rows = program(forward.place, "attention_rows");
  make_classes(forward, by_queries);
  launch(forward.place, of_rows, "row_statistics", ceil_div(rows, kSubGroups), by_queries);
  launch(forward.place, kernels, kernel_of(columns, {"queries_64", "queries_128", "queries_256"}),
         heads * by_queries.q_tiles.count, by_queries);  // computes units for the other pass
  launch(forward.place, kernels, kernel_of(columns, {"keys_64", "keys_128", "keys_256"}),
         forward.batch() * forward.kv_heads() * by_keys.kv_tiles.count, by_keys);
  if (args.grad_sink) launch(forward.place, of_rows, "sink_gradient", forward.heads(), by_queries);
  const CapturedGradients captured(args, mods, workspace.at(layout.at_captured()));
  if (captured.any())
    captured.run(by_queries, kernel_of(columns, {"captured_64", "captured_128", "captured_256"}),
                 heads * by_queries.q_tiles.count);
  mods.check_fault("attention_backward");
}

std::string_view refuses(const AttentionForwardArgs& args) {
  if (!is_activation(args.q.dtype)) return "inputs are neither float32 nor bfloat16 nor float16";
  if (larger(args.q.size(3), args.ev()) > kMaxColumns) return "head dims above 256";
  if (args.mask && args.mask.dtype == DType::float64) return "a mask of float64";
  for (const ScoreCall* mod : {args.score_mod, args.mask_mod})
    if (const std::string_view reason = refuses_mod(mod); !reason.empty()) return reason;
  if (args.batch() * args.heads() * args.q_length() >= INT32_MAX || gpu::class_count(args) >= INT32_MAX)
    return "more than 2^31 rows or blocks";
  return "";
}

std::string_view refuses_dpas(const AttentionForwardArgs& args) {
  if (args.q.dtype == DType::float32) return "inputs of float32";
  const std::string_view reason = refuses(args);
  return !reason.empty() || dpas_lanes(args.place) ? reason : "the device has no dpas";
}

std::string_view refuses_backward(const AttentionBackwardArgs& args) {
  const std::string_view reason = CapturedGradients::refuses(args);
  return reason.empty() ? refuses(args.forward) : reason;
}

constexpr Kernel<AttentionForwardArgs> kForward[] = {
    {"attention_forward_dpas_level_zero", refuses_dpas, run_forward_dpas},
    {"attention_forward_tiles_level_zero", refuses, run_forward_tiles}};
constexpr Kernel<AttentionBackwardArgs> kBackward[] = {
    {"attention_backward_tiles_level_zero", refuses_backward, run_backward}};

}  // namespace

void add_attention_rows(Backend& backend) {
  add_rows(backend, kForward, std::size(kForward)), add_rows(backend, kBackward, std::size(kBackward));
}

}  // namespace lowbit::level_zero
