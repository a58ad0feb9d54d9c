// SPDX-License-Identifier: Apache-2.0
#include "ops/optim.hpp"

#include <algorithm>
#include <cmath>

#include "core/random.hpp"

namespace lowbit {

using enum ErrorKind;

namespace {

int moments_of(Rule rule, const Hyper& hyper) {
  if (rule == Rule::adamw) return hyper.amsgrad ? 3 : 2;
  return rule == Rule::sgd && hyper.momentum == 0 ? 0 : 1;
}

StateFormat state_format(std::string_view op, int64_t format, int64_t block_size) {
  check(format >= 0 && format < static_cast<int64_t>(std::size(kStateFormatNames)), value, op, ": state_format must be 0..",
        std::size(kStateFormatNames) - 1, ", got ", format);
  check(block_size >= kMinStateBlock && block_size <= kMaxStateBlock && (block_size & (block_size - 1)) == 0, value, op,
        ": block_size must be a power of two from ", kMinStateBlock, " to ", kMaxStateBlock, ", got ", block_size);
  return static_cast<StateFormat>(format);
}

// Every element once and no gaps: the dimensions, ordered by stride, each start where the one before ends.
bool is_dense(const TensorView& view) {
  std::array<int, TensorView::kMaxRank> order;
  int count = 0;
  for (int i = 0; i < view.rank; i++)
    if (view.shape[i] != 1) order[count++] = i;
  std::sort(order.begin(), order.begin() + count, [&](int a, int b) { return view.stride[a] < view.stride[b]; });
  int64_t expected = 1;
  for (int i = 0; i < count; i++) {
    if (view.stride[order[i]] != expected) return false;
    expected *= view.shape[order[i]];
  }
  return true;
}

bool same_order(const TensorView& a, const TensorView& b) {
  if (a.rank != b.rank) return false;
  for (int i = 0; i < a.rank; i++)
    if (a.shape[i] != b.shape[i] || (a.shape[i] != 1 && a.stride[i] != b.stride[i])) return false;
  return true;
}

template <class... What>
void check_flat(const TensorView& view, DType dtype, int64_t numel, const What&... what) {
  check(view.dtype == dtype, type, what..., " must be ", name_of(dtype), ", got ", name_of(view.dtype));
  check(view.numel() == numel, value, what..., " must have ", numel, " elements, got ", shape_text(view));
  check(is_dense(view), value, what..., " must be dense in memory");
}

void check_state(std::string_view op, std::string_view codes_name, std::string_view scale_name, const TensorView& codes, const TensorView* scale,
                 StateFormat format, int64_t block_size, int64_t numel, std::size_t index) {
  if (!has_codes(format)) {
    check_flat(codes, format == StateFormat::float32 ? DType::float32 : DType::bfloat16, numel, op, ": ", codes_name, "[", index, "]");
    return;
  }
  check_flat(codes, DType::uint8, state_bytes(format, numel), op, ": ", codes_name, "[", index, "]");
  check_flat(*scale, DType::float32, (numel + block_size - 1) / block_size, op, ": ", scale_name, "[", index, "]");
}

void check_count(std::string_view name, std::size_t got, std::size_t wanted) {
  check(got == wanted, value, "optim_step: ", name, " must have ", wanted, " entries, got ", got);
}

float one_number(std::string_view name, const TensorView& view) {
  check(view.dtype == DType::float32 && view.numel() == 1, type, "optim_step: ", name, " must be one float32, got ", name_of(view.dtype), " ", shape_text(view));
  return *view.as<float>();
}

uint64_t seed_of(int64_t seed, double step, std::size_t index) {
  const auto bits = static_cast<uint64_t>(seed);
  const auto random = philox4x32({static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), static_cast<uint32_t>(step), 0},
                                 {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)});
  return uint64_t{random[0]} << 32 | random[1];
}

}  // namespace

void optim_step(int64_t rule_, int64_t format_, int64_t block_size, const OptimLists& lists, const Hyper& hyper, const TensorView& grad_scale,
                const TensorView& found_inf, std::optional<int64_t> seed) {
  check(rule_ >= 0 && rule_ < static_cast<int64_t>(std::size(kRuleNames)), value, "optim_step: rule must be 0..", std::size(kRuleNames) - 1, ", got ", rule_);
  const Rule rule = static_cast<Rule>(rule_);
  const StateFormat format = state_format("optim_step", format_, block_size);
  const std::size_t count = lists.params.size(), moments = static_cast<std::size_t>(moments_of(rule, hyper));
  check_count("grads", lists.grads.size(), count);
  check_count("steps", lists.steps.size(), count);
  check_count("states", lists.moments.size(), moments);
  if (has_codes(format)) check_count("scales", lists.scales.size(), moments);
  for (std::size_t k = 0; k < moments; k++) {
    check_count(concat("states[", k, "]"), lists.moments[k].size(), count);
    if (has_codes(format)) check_count(concat("scales[", k, "]"), lists.scales[k].size(), count);
  }
  std::vector<OptimTensor> tensors(count);
  for (std::size_t i = 0; i < count; i++) {
    const TensorView &param = lists.params[i], &grad = lists.grads[i];
    check(is_activation(param.dtype), type, "optim_step: params[", i, "] must be float32, bfloat16 or float16, got ", name_of(param.dtype));
    check(is_activation(grad.dtype), type, "optim_step: grads[", i, "] must be float32, bfloat16 or float16, got ", name_of(grad.dtype));
    check(is_dense(param), value, "optim_step: params[", i, "] must be dense in memory, got shape ", shape_text(param));
    check(same_order(param, grad), value, "optim_step: grads[", i, "] must have the shape and strides of its parameter ", shape_text(param), ", got ", shape_text(grad));
    tensors[i] = {.param = param.data, .grad = grad.data, .param_dtype = param.dtype, .grad_dtype = grad.dtype, .moment = {}, .scale = {},
                  .numel = param.numel(), .step = one_number(concat("steps[", i, "]"), lists.steps[i]) + 1.0, .seed = 0};
    for (std::size_t k = 0; k < moments; k++) {
      const TensorView* scale = has_codes(format) ? &lists.scales[k][i] : nullptr;
      check_state("optim_step", concat("states[", k, "]"), concat("scales[", k, "]"), lists.moments[k][i], scale, format, block_size, param.numel(), i);
      tensors[i].moment[k] = lists.moments[k][i].data;
      tensors[i].scale[k] = scale ? scale->as<float>() : nullptr;
    }
    if (seed) tensors[i].seed = seed_of(*seed, tensors[i].step, i);
  }
  const float scale = grad_scale ? one_number("grad_scale", grad_scale) : 1.0f;
  if (found_inf && one_number("found_inf", found_inf) != 0) return;  // the whole step is skipped, as torch's fused optimizers do
  for (std::size_t i = 0; i < count; i++) *lists.steps[i].as<float>() = static_cast<float>(tensors[i].step);
  run(OptimArgs{.rule = rule, .format = format, .block_size = block_size, .hyper = hyper, .tensors = tensors, .grad_scale = scale,
                .stochastic_rounding = seed.has_value()});
}

namespace {

void convert_state(std::string_view op, const TensorView& values, int64_t format_, bool is_signed, int64_t block_size, const TensorView& codes,
                   const TensorView& scale, bool encode) {
  const StateFormat format = state_format(op, format_, block_size);
  check(has_codes(format), value, op, ": state_format must have codes, got ", kStateFormatNames[format_]);
  check_flat(values, DType::float32, values.numel(), op, ": values");
  check_flat(codes, DType::uint8, state_bytes(format, values.numel()), op, ": codes");
  check_flat(scale, DType::float32, (values.numel() + block_size - 1) / block_size, op, ": scale");
  const StateConversion conversion{.encode = encode, .is_signed = is_signed, .numel = values.numel(), .values = values.as<float>(),
                                   .codes = codes.as<uint8_t>(), .scale = scale.as<float>()};
  run(OptimArgs{.format = format, .block_size = block_size, .conversion = &conversion});
}

}  // namespace

void encode_state(const TensorView& values, int64_t format, bool is_signed, int64_t block_size, const TensorView& codes, const TensorView& scale) {
  convert_state("encode_state", values, format, is_signed, block_size, codes, scale, true);
}

void decode_state(const TensorView& codes, const TensorView& scale, int64_t format, bool is_signed, int64_t block_size, const TensorView& values) {
  convert_state("decode_state", values, format, is_signed, block_size, codes, scale, false);
}

}  // namespace lowbit
