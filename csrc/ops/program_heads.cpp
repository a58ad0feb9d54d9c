// SPDX-License-Identifier: Apache-2.0
#include "ops/program_heads.hpp"

#include "core/scratch.hpp"
#include "ops/checks.hpp"
#include "ops/place.hpp"
#include "ops/program_views.hpp"

namespace lowbit {

using enum ErrorKind;

namespace {

constexpr std::string_view kHeads = "heads";

TensorView before_tokens(TensorView heads) {  // [B, L, H, n] as [B, H, L, n]
  std::swap(heads.shape[1], heads.shape[2]);
  std::swap(heads.stride[1], heads.stride[2]);
  return heads;
}

// Where heads of x [B, L, heads, size] go: [B, heads, L, size].
TensorView place_of_heads(const HeadsStep& step, const TensorView& x, const TensorView& into, int64_t start) {
  const int64_t batch = x.size(0), length = x.size(1);
  if (!step.into)
    return before_tokens(shaped({.dtype = x.dtype, .device = x.device}, {batch, length, step.heads, step.size}));
  place_of(kHeads, {{"x", x}, {"into", into}});
  check_dtype(kHeads, "into", into, x.dtype);
  if (step.start < 0) {
    check(into.rank == 3 && into.size(0) == batch && into.size(1) == length && into.size(2) % step.heads == 0, value,
          kHeads, ": into must have the rows of x and ", step.heads, " heads, got ", shape_text(into));
    const int64_t m = into.size(2) / step.heads;
    check(step.into_column + step.size <= m, value, kHeads, ": into must have heads with room for ", step.size,
          " columns from ", step.into_column, " on, got ", m);
    return before_tokens(heads_of(kHeads, "into", into, step.into_column, step.heads, step.size, m));
  }
  check(into.rank == 4 && into.size(0) == batch && into.size(1) == step.heads, value, kHeads,
        ": into must have shape [B, heads, S, m], here ", batch, " times ", step.heads, ", got ", shape_text(into));
  check(start >= 0 && start + length <= into.size(2), value, kHeads, ": into must have room for tokens ", start, " to ",
        start + length, ", got ", into.size(2));
  check(step.into_column + step.size <= into.size(3), value, kHeads, ": into must have room for ", step.size,
        " columns from ", step.into_column, " on, got ", into.size(3));
  check_dense_rows(kHeads, "into", into);
  TensorView view = into;
  view.shape[2] = length, view.shape[3] = step.size;
  if (view.data)
    view.data = into.as<char>() +
                (start * into.stride[2] + step.into_column) * static_cast<int64_t>(size_of(into.dtype));
  return view;
}

}  // namespace

HeadsArgs step_args(const HeadsStep& step, const TensorView& x, const TensorView& cos, const TensorView& sin,
                    const TensorView& weight, const TensorView& into, int64_t start) {
  const TensorView heads = heads_of(kHeads, "x", x, step.column, step.heads, step.size, step.step);
  const TensorView no_angles = shaped({.dtype = x.dtype, .device = x.device}, {1, x.size(1), 0});
  const TensorView no_keys = shaped({.dtype = x.dtype, .device = x.device}, {x.size(0), 0, x.size(1), step.size});
  HeadsArgs args{{.qkv = heads, .cos = step.cos ? cos : no_angles, .sin = step.sin ? sin : no_angles,
                  .q_weight = weight, .k_weight = {}, .eps = step.eps, .offset = step.offset, .keys = no_keys,
                  .values = no_keys, .rotated = {}, .rotation = step.rotation}};
  check_args(args);
  args.rotated = place_of_heads(step, heads, into, start);
  return args;
}

GatherLinearArgs step_args(const HeadLinearStep& step, const TensorView& x, const TensorView& weight) {
  constexpr std::string_view op = "head_linear";
  check(weight.rank == 3 && weight.size(0) >= 1, value, op,
        ": weight must have shape [heads, panels, panel_bytes], got ", shape_text(weight));
  const int64_t heads = weight.size(0);
  check(x.rank == 3 && x.size(2) == heads * step.spec.k, value, op, ": x must have shape [B, L, ", heads, " * ",
        step.spec.k, "], got ", shape_text(x));
  check_contiguous(op, "x", x);
  const int64_t rows = x.size(0) * x.size(1);
  GatherLinearArgs args{.weight_spec = step.spec, .x = shaped(x, {rows, heads, step.spec.k}), .weight = weight,
                        .index = shaped({.dtype = DType::int32, .device = x.device}, {rows, heads}), .bias = {}};
  args = gather_linear_args(args, step.x_format);
  args.y = shaped({.dtype = x.dtype, .device = x.device}, {rows, heads, step.spec.n});
  return args;
}

void run_by_head(GatherLinearArgs args) {
  const int64_t heads = args.index.size(1), rows = args.rows();
  const Scratch memory(rows * static_cast<int64_t>(sizeof(int32_t)));
  auto* const index = memory.as<int32_t>();
  for (int64_t row = 0; row < rows; row++) index[row] = static_cast<int32_t>(row % heads);
  args.index.data = index;
  run(args);
}

}  // namespace lowbit
