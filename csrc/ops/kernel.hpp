// SPDX-License-Identifier: Apache-2.0
// The dispatcher. A kernel row is {name, refuses, run}; a backend is a device and its rows, one table per op; each CPU
// instruction set is a backend. select() takes the first row on the device of the call that accepts it, or the row that
// the caller forces by name, and raises an error if that one refuses.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.hpp"
#include "core/place.hpp"
#include "recorder/dispatch.hpp"

namespace lowbit {

// All ops that have rows, with their argument structs; a backend has one table of rows for each.
#define LOWBIT_OPS(X) \
  X(linear, LinearArgs) \
  X(gather_linear, GatherLinearArgs) \
  X(experts, ExpertsArgs) \
  X(quantize, QuantizeArgs) \
  X(repack, RepackArgs) \
  X(dequantize, DequantizeArgs) \
  X(all_finite, AllFiniteArgs) \
  X(fake_quantize, FakeQuantizeArgs) \
  X(fake_quantize_backward, FakeQuantizeBackwardArgs) \
  X(fake_quantize_activations, FakeQuantizeActivationsArgs) \
  X(float8_cast, Float8CastArgs) \
  X(int8_pack, Int8PackArgs) \
  X(blocks_linear, BlocksLinearArgs) \
  X(blocks_dequantize, BlocksDequantizeArgs) \
  X(int8_linear, Int8LinearArgs) \
  X(block_sparse_linear, BlockSparseLinearArgs) \
  X(optim_step, OptimStepArgs) \
  X(encode_state, EncodeStateArgs) \
  X(decode_state, DecodeStateArgs) \
  X(score_program, ScoreProgramArgs) \
  X(block_classes, BlockClassesArgs) \
  X(attention_forward, AttentionForwardArgs) \
  X(attention_backward, AttentionBackwardArgs) \
  X(decode, DecodeArgs) \
  X(kv_quantize, KvQuantizeArgs) \
  X(kv_dequantize, KvDequantizeArgs) \
  X(rms_norm, RmsNormArgs) \
  X(rope_append, RopeAppendArgs) \
  X(route, RouteArgs) \
  X(sample, SampleArgs) \
  X(layer_norm, LayerNormArgs) \
  X(pointwise, PointwiseArgs) \
  X(gated_delta_rule, GatedDeltaRuleArgs) \
  X(gated_delta_rule_backward, GatedDeltaRuleBackwardArgs) \
  X(gated_rms_norm, GatedRmsNormArgs) \
  X(gated_rms_norm_backward, GatedRmsNormBackwardArgs) \
  X(causal_conv1d, CausalConv1dArgs) \
  X(causal_conv1d_backward, CausalConv1dBackwardArgs) \
  X(ssd, SsdArgs) \
  X(ssd_backward, SsdBackwardArgs) \
  X(selective_scan, SelectiveScanArgs) \
  X(selective_scan_backward, SelectiveScanBackwardArgs) \
  X(linear_cross_entropy, LinearCrossEntropyArgs)

#define LOWBIT_OP(op, Args) struct Args;
LOWBIT_OPS(LOWBIT_OP)
#undef LOWBIT_OP

template <class Args>
struct Kernel {
  // The functions of a row of another package (external/), with a pointer to that package's data.
  struct Bound {
    const void* self;
    std::string_view (*refuses)(const Args&, const void* self);
    void (*run)(const Args&, const void* self);
  };
  std::string_view name;                     // <op>_<what>_<target>: linear_int4_avx2
  std::string_view (*refuses)(const Args&);  // "" if the row can run these arguments, else the reason
  void (*run)(const Args&);
  const Bound* bound = nullptr;  // replaces the two functions, which are then null

  std::string_view why_not(const Args& args) const { return bound ? bound->refuses(args, bound->self) : refuses(args); }
  void operator()(const Args& args) const { bound ? bound->run(args, bound->self) : run(args); }
};

// A backend's fastest multiplication: `run` repeats a loop over registers `rounds` times and returns its operations.
struct Peak {
  Arithmetic arithmetic;
  std::string_view what;  // "float32 FMA, avx512"
  int64_t (*run)(int64_t rounds);
};

struct Backend {
  std::string_view name;
  DeviceType device;
  // Why this machine (or its environment variables) excludes the backend, or "".
  const std::string& (*unavailable)(Device device);
  // Runs a row with the device of the place ready for kernels; null: always ready.
  void (*guard)(const Place& place, const std::function<void()>& row) = nullptr;
  std::vector<Peak> peaks = {};
#define LOWBIT_OP(op, Args) std::vector<Kernel<Args>> op = {};
  LOWBIT_OPS(LOWBIT_OP)
#undef LOWBIT_OP
};

// Appends the rows of one table, best first. Neither a template nor inline: kernel files are compiled for one
// instruction set each, and must not contain weak symbols.
#define LOWBIT_OP(op, Args) LOWBIT_API void add_rows(Backend& backend, const Kernel<Args>* rows, std::size_t count);
LOWBIT_OPS(LOWBIT_OP)
#undef LOWBIT_OP
LOWBIT_API void add_peak(Backend& backend, const Peak& peak);

LOWBIT_API std::span<const Backend* const> backends();  // best first; defined once, in csrc/backends.cpp
LOWBIT_API bool has_backend(DeviceType device);         // whether this machine can run one now

// The table of a backend for the op with these arguments.
template <class Args> struct OpOf;
#define LOWBIT_OP(op, Args)                                         \
  template <> struct OpOf<Args> {                                   \
    static constexpr std::string_view name = #op;                   \
    static const auto& rows(const Backend& backend) { return backend.op; } \
  };
LOWBIT_OPS(LOWBIT_OP)
#undef LOWBIT_OP

struct RowInfo {
  std::string name, backend, device;
  bool available;
  std::string reason;  // why the row refuses
};
LOWBIT_API std::vector<RowInfo> rows_of(std::string_view op);

// The forced row of this thread ("" = none), else of the process (LOWBIT_KERNEL). It affects the op it belongs to, and
// no other.
LOWBIT_API std::string force_kernel(std::string name);  // returns the previous one; ValueError for an unknown name
LOWBIT_API std::string_view forced_kernel(std::string_view op);
LOWBIT_API std::string_view last_kernel(std::string_view op);  // the row that ran last on this thread
LOWBIT_API void note_ran(std::string_view op, std::string_view name);

// The highest peak among the backends that this CPU can run, on `threads` threads; the best of `repeats` runs.
struct PeakRate {
  std::string_view what;
  double operations_per_s = 0;
};
LOWBIT_API PeakRate peak_rate(Arithmetic arithmetic, int threads, int repeats);

struct Choice {
  std::string name;
  bool chosen;
  std::string reason;
};

// Why a row that accepts the call comes after the chosen one.
inline constexpr std::string_view kBetterFits = "a better row fits";

// The rows of the call's device, and a forced row of another device.
template <class Args>
std::vector<Choice> explain(const Args& args) {
  const std::string_view forced = forced_kernel(OpOf<Args>::name);
  const Device device = args.place.device;
  std::vector<Choice> choices;
  bool found = false;
  for (const Backend* backend : backends())
    for (const Kernel<Args>& row : OpOf<Args>::rows(*backend)) {
      std::string reason;
      if (backend->device != device.type) {
        if (row.name != forced) continue;
        reason = concat("runs on ", name_of(backend->device), ", and the call is on ", name_of(device));
      }
      if (reason.empty()) reason = backend->unavailable(device);
      if (reason.empty()) reason = row.why_not(args);
      if (reason.empty() && !forced.empty() && row.name != forced) reason = concat("the row ", forced, " is forced");
      if (reason.empty() && found) reason = kBetterFits;
      choices.push_back({std::string(row.name), reason.empty(), reason});
      found |= reason.empty();
    }
  return choices;
}

template <class Args>
struct Selected {
  const Backend& backend;
  const Kernel<Args>& row;
};

template <class Args>
Selected<Args> select(const Args& args) {
  const std::string_view forced = forced_kernel(OpOf<Args>::name);
  const Device device = args.place.device;
  for (const Backend* backend : backends()) {
    if (backend->device != device.type || !backend->unavailable(device).empty()) continue;
    for (const Kernel<Args>& row : OpOf<Args>::rows(*backend))
      if ((forced.empty() || row.name == forced) && row.why_not(args).empty()) return {*backend, row};
  }
  std::string message =
      concat(OpOf<Args>::name, ": no kernel row fits", forced.empty() ? "" : concat(" (forced: ", forced, ")"));
  for (const Choice& choice : explain(args))
    if (forced.empty() || choice.name == forced) message += concat("\n  ", choice.name, ": ", choice.reason);
  throw Error(ErrorKind::not_implemented, message);
}

template <class Args>
void run_row(const Args& args, const Selected<Args>& selected) {
  if (!selected.backend.guard) selected.row(args);
  else selected.backend.guard(args.place, [&] { selected.row(args); });
}

// describe(args) is declared beside the Args of each op.
template <class Args>
void run_selected(const Args& args, const Selected<Args>& selected) {
  const std::string_view op = OpOf<Args>::name, name = selected.row.name;
  note_ran(op, name);  // before the run: a row may report a fault of an earlier one
  if (!recorder::wanted()) return run_row(args, selected);
  recorder::Dispatch dispatch(op, name, args.place, describe(args));
  run_row(args, selected);
  dispatch.finished();
}

template <class Args>
void run(const Args& args) { run_selected(args, select(args)); }

}  // namespace lowbit
