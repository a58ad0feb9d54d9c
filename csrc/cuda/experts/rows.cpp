// SPDX-License-Identifier: Apache-2.0
// Rows of the op experts: pairs are sorted by expert on the device, and each product is one launch for all experts. The
// host reads nothing of a call.
#include <algorithm>

#include "cuda/backend.hpp"
#include "cuda/experts/call.hpp"
#include "cuda/experts/sources.hpp"
#include "cuda/linear/make_product_call.hpp"
#include "ops/experts.hpp"

namespace lowbit::cuda {
namespace {

constexpr int64_t kMaxSums = int64_t{256} << 20;  // bytes of the sums of a pass

// One of the two products as a call of linear over all rows.
LinearArgs product_args(const ExpertsArgs& args, const ExpertWeights& weights, int64_t rows, const void* x) {
  return {.place = args.place, .m = rows, .weight_spec = weights.spec, .x_format = weights.x_format,
          .dtype = args.x.dtype, .bias_dtype = weights.bias.dtype, .x = x,
          .weight = weights.packed.as<const uint8_t>(), .bias = weights.bias.data,
          .low_rank = {}};
}

struct ExpertProduct {
  LinearKind kind;
  int splits = 1;

  // For as many rows as an expert has on average.
  ExpertProduct(const ExpertsArgs& args, const ExpertWeights& weights)
      : kind(kind_of(product_args(args, weights, ceil_div(args.index.numel(), args.experts()), nullptr))) {}

  int64_t ctas(const ExpertWeights& weights, int64_t rows) const {
    return ceil_div(weights.spec.panels(), kind.shape().panels()) * (rows / kind.rows);
  }
  void split(const ExpertsArgs& args, const ExpertWeights& weights, int64_t rows) {
    const int64_t wanted = multiprocessors(args.place.device) / ctas(weights, rows),
                  most = smaller(weights.spec.tiles() / (2 * kLinearWarps), 16);
    splits = static_cast<int>(larger(1, smaller(wanted, most)));
  }
};

// The tokens of a pass, and its memory: byte offsets, multiples of 256.
struct Pass {
  ExpertProduct up, down;
  int64_t rows_of_block, tokens, blocks = 0;
  int64_t pair_of_row = 0, row_of_pair = 0, rows = 0, hidden = 0, sums = 0, bytes = 0;

  explicit Pass(const ExpertsArgs& args) : up(args, args.gate_up), down(args, args.down),
        rows_of_block(std::max(up.kind.rows, down.kind.rows)) {
    const int64_t n = std::max(args.gate_up.spec.n, args.down.spec.n), each = larger(1, args.each()),
                  most_rows = kMaxSums / (4 * n) - args.experts() * rows_of_block;
    tokens = smaller(args.tokens(), larger(1, most_rows / each));
    const int64_t pairs = tokens * args.each();
    blocks = smaller(pairs, pairs / rows_of_block + args.experts());
    if (blocks == 0) return;
    up.split(args, args.gate_up, all_rows()), down.split(args, args.down, all_rows());
    const auto element = static_cast<int64_t>(size_of(args.x.dtype));
    const auto take = [&](int64_t of) { return bytes += round_up(of, 256), bytes - round_up(of, 256); };
    take(4 * blocks), pair_of_row = take(4 * all_rows()), row_of_pair = take(4 * pairs);
    rows = take(all_rows() * args.gate_up.spec.k * element), hidden = take(all_rows() * args.down.spec.k * element);
    sums = take(4 * all_rows() * larger(up.splits * args.gate_up.spec.n, down.splits * args.down.spec.n));
  }
  int64_t all_rows() const { return blocks * rows_of_block; }
};

GateCall gate_call(const Gate& gate) {
  static_assert(static_cast<int>(GateActivation::silu) == static_cast<int>(ExpertActivation::silu) &&
                static_cast<int>(GateActivation::relu_squared) + 1 == std::size(kExpertActivationNames));
  return {.activation = static_cast<GateActivation>(gate.activation), .gated = gate.gated,
          .interleaved = gate.interleaved, .alpha = gate.alpha, .limit = gate.limit, .up_offset = gate.up_offset};
}

ExpertsCall experts_call(const ExpertsArgs& args, const Pass& pass, int64_t first, int64_t tokens, char* memory) {
  const auto at = [&](const TensorView& view, int64_t width) {
    return static_cast<char*>(view.data) + first * width * static_cast<int64_t>(size_of(view.dtype));
  };
  const auto number = [&](int64_t byte) { return reinterpret_cast<int32_t*>(memory + byte); };
  const int64_t width = args.gate_up.spec.k, n = args.down.spec.n;
  return {.x = at(args.x, width), .index = at(args.index, args.each()), .weights = at(args.weights, args.each()),
          .dtype = args.x.dtype, .index_dtype = args.index.dtype, .weights_dtype = args.weights.dtype,
          .gate = gate_call(args.gate), .experts = static_cast<int32_t>(args.experts()),
          .each = static_cast<int32_t>(args.each()), .tokens = tokens, .width = width, .inner = args.down.spec.k, .n = n,
          .blocks = static_cast<int32_t>(pass.blocks), .rows_of_block = static_cast<int32_t>(pass.rows_of_block),
          .expert_of_block = number(0), .pair_of_row = number(pass.pair_of_row),
          .row_of_pair = number(pass.row_of_pair), .rows = memory + pass.rows, .hidden = memory + pass.hidden,
          .y = at(args.y, n), .product = {}, .weight_bytes = 0};
}

void launch_pairs(const ExpertsArgs& args, const ExpertsCall& call) {
  const Program& pairs = program(args.place, {static_cast<int64_t>(SourceKind::expert_pairs)}, pairs_source);
  pairs.launch_early(args.place, "sort_pairs", 1, kLinearThreads, &call);
  pairs.launch_early(args.place, "gather_rows", call.all_rows(), kLinearThreads, &call);
}

// The kernel that reads the sums of a product: one of ends.cuh.
void launch_end(const ExpertsArgs& args, const LinearKind& kind, const char* kernel, int64_t elements,
                const ExpertsCall& call) {
  const SourceKey key{static_cast<int64_t>(SourceKind::expert_ends), static_cast<int64_t>(kind.format),
                      kind.x_parts == 0, kind.tile_groups > 0};
  program(args.place, key, [&] { return ends_source(kind); })
      .launch_early(args.place, kernel, ceil_div(elements, kLinearThreads), kLinearThreads, &call);
}

void launch_product(const ExpertsArgs& args, const ExpertWeights& weights, const ExpertProduct& product, const void* x,
                    void* sums, ExpertsCall& call, const char* end, int64_t elements) {
  const LinearArgs linear = product_args(args, weights, call.all_rows(), x);
  const LinearKind& kind = product.kind;
  run_ordered(linear, kind, 1, [&](const ProductCall& of_linear) {
    call.product = of_linear;
    call.product.splits = product.splits, call.product.partial = sums;
    call.weight_bytes = weights.spec.panels() * weights.spec.panel_bytes();
    program(args.place, key_of(SourceKind::experts, kind), [&] { return experts_source(kind); })
        .launch_early(args.place, "product_of_experts", product.ctas(weights, linear.m) * product.splits,
                      kLinearThreads, &call, kind.shape().bytes());
    launch_end(args, kind, end, elements, call);
  });
}

void run_experts(const ExpertsArgs& args) {
  if (args.y.numel() == 0) return;
  const Pass pass(args);
  const Workspace workspace("experts", args.place, larger(pass.bytes, 16));
  auto* const memory = static_cast<char*>(workspace.at(0));
  for (int64_t first = 0; first < args.tokens(); first += pass.tokens) {
    ExpertsCall call = experts_call(args, pass, first, smaller(pass.tokens, args.tokens() - first), memory);
    const int64_t elements = call.all_rows() * call.inner, of_y = call.tokens * call.n;
    if (pass.blocks == 0) {  // no pairs: zeros
      launch_end(args, pass.down.kind, "add_experts", of_y, call);
      continue;
    }
    launch_pairs(args, call);
    void* const sums = memory + pass.sums;
    launch_product(args, args.gate_up, pass.up, call.rows, sums, call, "gate_experts", elements);
    launch_product(args, args.down, pass.down, call.hidden, sums, call, "add_experts", of_y);
  }
}

std::string_view refuses_product(const ExpertsArgs& args, const ExpertWeights& weights, bool codes) {
  if (const std::string_view reason = refuses_weight(product_args(args, weights, 1, nullptr)); !reason.empty())
    return reason;
  if (stays_float(weights.x_format) == codes) return codes ? "float activations" : "int8 activations";
  if (codes && weights.spec.k > kMaxCodesK) return "k above 131072: an int32 cannot hold the sum";
  return "";
}

template <bool kCodes>
std::string_view refuses(const ExpertsArgs& args) {
  const std::string_view reason = refuses_product(args, args.gate_up, kCodes);
  if (!reason.empty()) return reason;
  if (args.experts() > kMaxExperts) return "more than 2048 experts";
  return refuses_product(args, args.down, kCodes);
}

constexpr Kernel<ExpertsArgs> kRows[] = {{"experts_int8_cuda", refuses<true>, run_experts},
                                         {"experts_cuda", refuses<false>, run_experts}};

}  // namespace

void add_experts_rows(Backend& backend) { add_rows(backend, kRows, std::size(kRows)); }

}  // namespace lowbit::cuda
