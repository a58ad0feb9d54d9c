// SPDX-License-Identifier: Apache-2.0
#include "ops/optim.hpp"

#include "ops/checks.hpp"
#include "ops/moved.hpp"
#include "ops/place.hpp"

namespace lowbit {

using enum ErrorKind;

namespace {

// Covers each element once, without gaps: the dimensions, ordered by stride, each start where the one before ends.
// Strides of an empty tensor are ignored.
bool is_dense(const TensorView& view) {
  if (view.numel() == 0) return true;
  std::array<int, TensorView::kMaxRank> order;
  int count = 0;
  for (int i = 0; i < view.rank; i++) {
    if (view.shape[i] == 1) continue;
    int at = count++;
    for (; at > 0 && view.stride[order[at - 1]] > view.stride[i]; at--) order[at] = order[at - 1];
    order[at] = i;
  }
  int64_t expected = 1;
  for (int i = 0; i < count; i++) {
    if (view.stride[order[i]] != expected) return false;
    expected *= view.shape[order[i]];
  }
  return true;
}

bool same_order(const TensorView& a, const TensorView& b) {
  if (a.rank != b.rank) return false;
  const bool empty = a.numel() == 0;
  for (int i = 0; i < a.rank; i++)
    if (a.shape[i] != b.shape[i] || (!empty && a.shape[i] != 1 && a.stride[i] != b.stride[i])) return false;
  return true;
}

template <class... What>
void check_flat(const TensorView& view, DType dtype, int64_t numel, const What&... what) {
  check(view.dtype == dtype, type, what..., " must be ", name_of(dtype), ", got ", name_of(view.dtype));
  check(view.numel() == numel, value, what..., " must have ", numel, " elements, got ", shape_text(view));
  check(is_dense(view), value, what..., " must be dense in memory");
}

template <class... What>
void check_state(StateFormat format, int64_t block_size, int64_t numel, const TensorView& codes,
                 const TensorView& scale, const What&... what) {
  if (!has_codes(format))
    return check_flat(codes, format == StateFormat::float32 ? DType::float32 : DType::bfloat16, numel, what...);
  check_flat(codes, DType::uint8, state_bytes(format, numel), what...);
  check_flat(scale, DType::float32, (numel + block_size - 1) / block_size, what..., " scale");
}

template <class... What>
float* one_number(const TensorView& view, const What&... what) {
  check(view.dtype == DType::float32 && view.numel() == 1, type, what..., " must be one float32, got ",
        name_of(view.dtype), " ", shape_text(view));
  return view.as<float>();
}

}  // namespace

StateFormat state_format(std::string_view op, int64_t format, int64_t block_size) {
  check_number(op, "state_format", format, std::size(kStateFormatNames));
  check(block_size >= kMinStateBlock && block_size <= kMaxStateBlock && (block_size & (block_size - 1)) == 0, value, op,
        ": block_size must be a power of two from ", kMinStateBlock, " to ", kMaxStateBlock, ", got ", block_size);
  return static_cast<StateFormat>(format);
}

OptimStep::OptimStep(int64_t rule, int64_t format, int64_t block_size, const Hyper& hyper, const TensorView& grad_scale,
                     const TensorView& found_inf, std::optional<int64_t> seed)
    : grad_scale_(grad_scale), found_inf_(found_inf) {
  args_.rule = static_cast<Rule>(check_number("optim_step", "rule", rule, std::size(kRuleNames)));
  args_.format = state_format("optim_step", format, block_size);
  args_.block_size = block_size;
  args_.hyper = hyper;
  args_.grad_scale = grad_scale ? one_number(grad_scale, "optim_step: grad_scale") : nullptr;
  args_.found_inf = found_inf ? one_number(found_inf, "optim_step: found_inf") : nullptr;
  args_.stochastic_rounding = seed.has_value();
  args_.seed = static_cast<uint64_t>(seed.value_or(0));
  args_.moments = with_rule(args_.rule, [&]<class Type>() { return moments_of<Type>(hyper); });
}

void OptimStep::add(const TensorView& param, const TensorView& grad, const TensorView& step, const TensorView* moment,
                    const TensorView* scale, const TensorView& correction) {
  const std::size_t i = tensors_.size();
  if (i == 0) first_ = param;
  args_.place.device = device_of("optim_step", {{"params[0]", first_}, {"params", param}, {"grads", grad},
                                                {"steps", step}, {"grad_scale", grad_scale_},
                                                {"found_inf", found_inf_}});
  check_on(args_.place, "optim_step", "states", {moment, static_cast<std::size_t>(moments())});
  if (has_scales()) check_on(args_.place, "optim_step", "scales", {scale, static_cast<std::size_t>(moments())});
  check(is_activation(param.dtype), type, "optim_step: params[", i, "] must be float32, bfloat16 or float16, got ",
        name_of(param.dtype));
  check(is_activation(grad.dtype), type, "optim_step: grads[", i, "] must be float32, bfloat16 or float16, got ",
        name_of(grad.dtype));
  check(is_dense(param), value, "optim_step: params[", i, "] must be dense in memory, got shape ", shape_text(param));
  check(same_order(param, grad), value, "optim_step: grads[", i, "] must have the shape and strides of its parameter ",
        shape_text(param), ", got ", shape_text(grad));
  if (correction) {
    check(param.dtype == DType::bfloat16, type, "optim_step: params[", i,
          "] must be bfloat16 to have a correction, got ", name_of(param.dtype));
    check(!args_.stochastic_rounding, value, "optim_step: seed must be None for parameters with corrections");
    check_flat(correction, DType::int8, param.numel(), "optim_step: corrections[", i, "]");
    check_on(args_.place, "optim_step", "corrections", {&correction, 1});
  }
  OptimTensor tensor{.param = param.data,
                     .grad = grad.data,
                     .param_dtype = param.dtype,
                     .grad_dtype = grad.dtype,
                     .moment = {},
                     .scale = {},
                     .numel = param.numel(),
                     .step_count = one_number(step, "optim_step: steps[", i, "]")};
  for (int k = 0; k < args_.moments; k++) {
    check_state(args_.format, args_.block_size, param.numel(), moment[k], has_scales() ? scale[k] : TensorView{},
                "optim_step: states[", k, "][", i, "]");
    tensor.moment[k] = moment[k].data;
    tensor.scale[k] = has_scales() ? scale[k].as<float>() : nullptr;
  }
  tensors_.push_back(tensor);
  if (correction) corrections_.push_back(static_cast<uint8_t*>(correction.data));
}

void OptimStep::run() {
  args_.tensors = tensors_, args_.corrections = corrections_;
  args_.place.stream = current_stream(args_.place.device);  // the step may have been prepared on another one
  if (!tensors_.empty()) lowbit::run(args_);
}

namespace {

template <class Args>
void check_conversion(std::string_view op, Args& args) {
  args.place = place_of(op, {{"values", args.values}, {"codes", args.codes}, {"scale", args.scale}});
  check(has_codes(args.format), value, op, ": state_format must have codes, got ",
        kStateFormatNames[static_cast<int>(args.format)]);
  check_flat(args.values, DType::float32, args.values.numel(), op, ": values");
  check_state(args.format, args.block_size, args.values.numel(), args.codes, args.scale, op, ": codes");
}

}  // namespace

void encode_state(EncodeStateArgs args) {
  check_conversion("encode_state", args);
  run(args);
}

void decode_state(DecodeStateArgs args) {
  check_conversion("decode_state", args);
  run(args);
}

// Sizes: the number of tensors, and of elements in all of them.
Call describe(const OptimStepArgs& args) {
  int64_t numel = 0, params = 0, grads = 0, moments = 0;
  for (const OptimTensor& tensor : args.tensors) {
    numel += tensor.numel;
    params += tensor.numel * static_cast<int64_t>(size_of(tensor.param_dtype));
    grads += tensor.numel * static_cast<int64_t>(size_of(tensor.grad_dtype));
    const int64_t scales =
        has_codes(args.format) ? (tensor.numel + args.block_size - 1) / args.block_size * 4 : 0;
    moments += args.moments * (state_bytes(args.format, tensor.numel) + scales);
  }
  if (!args.corrections.empty()) params += numel;
  Call call{.read = params + grads + moments, .written = params + moments + (args.grad_scale ? grads : 0)};
  if (!args.tensors.empty())
    call.add(args.tensors.front().param_dtype, {static_cast<int64_t>(args.tensors.size()), numel});
  return call;
}

Call describe(const EncodeStateArgs& args) { return encoding(args.values, args.codes, args.scale); }
Call describe(const DecodeStateArgs& args) { return decoding(args.codes, args.scale, args.values); }

}  // namespace lowbit
