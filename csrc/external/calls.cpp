// SPDX-License-Identifier: Apache-2.0
#include "external/calls.hpp"

#include <cstddef>

namespace lowbit::external {
namespace {

#define LOWBIT_SAME(number, value) static_assert(static_cast<int>(number) == static_cast<int>(value))
LOWBIT_SAME(LOWBIT_FLOAT64, DType::float64);
LOWBIT_SAME(LOWBIT_BOOL, DType::boolean);
LOWBIT_SAME(LOWBIT_NOT_GIVEN, DType::other);
LOWBIT_SAME(LOWBIT_FORMAT_INT4, Format::int4);
LOWBIT_SAME(LOWBIT_FORMAT_FP8_E4M3, Format::fp8_e4m3);
LOWBIT_SAME(LOWBIT_FORMAT_INT8_SEMI_SPARSE, Format::int8_semi_sparse);
LOWBIT_SAME(LOWBIT_LAYOUT_ROW_MAJOR, Layout::row_major);
LOWBIT_SAME(LOWBIT_MAPPING_ASYMMETRIC, Mapping::asymmetric);
LOWBIT_SAME(LOWBIT_SCALE_SEARCH, ScaleChoice::search);
LOWBIT_SAME(LOWBIT_X_FLOAT8_ROW, XFormat::float8_row);
LOWBIT_SAME(LOWBIT_ACTIVATION_SILU, Activation::silu);
LOWBIT_SAME(LOWBIT_MUON, Rule::muon);
LOWBIT_SAME(LOWBIT_STATE_FLOAT8, StateFormat::float8);
#undef LOWBIT_SAME

// The table of an optimizer step is passed on without conversion.
#define LOWBIT_SAME(field) static_assert(offsetof(lowbit_optim_tensor, field) == offsetof(OptimTensor, field))
LOWBIT_SAME(grad);
LOWBIT_SAME(param_dtype);
LOWBIT_SAME(grad_dtype);
LOWBIT_SAME(moment);
LOWBIT_SAME(scale);
LOWBIT_SAME(numel);
LOWBIT_SAME(step_count);
static_assert(sizeof(lowbit_optim_tensor) == sizeof(OptimTensor));
#undef LOWBIT_SAME

lowbit_tensor tensor(const TensorView& view) {
  return {view.data, view.shape.data(), view.stride.data(), view.rank, static_cast<int32_t>(view.dtype)};
}

template <class Args>
lowbit_call head(const Args& args, std::size_t size) {
  const Place& place = args.place;
  return {size, LOWBIT_BACKEND_API, {name_of(place.device.type).data(), place.stream, place.device.index}};
}

TensorView dense(const void* data, DType dtype, Device device, std::initializer_list<int64_t> shape) {
  TensorView view{.data = const_cast<void*>(data), .dtype = dtype, .device = device};
  for (const int64_t size : shape) view.shape[view.rank++] = size;
  int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; stride *= view.shape[i--]) view.stride[i] = stride;
  return view;
}

TensorView on_host(void* data, DType dtype, int64_t size) {
  return data ? dense(data, dtype, {}, {size}) : TensorView{};
}

lowbit_weight weight(const WeightSpec& spec, const void* data, Layout layout = kKernelLayout) {
  const bool coded = !is_float(spec.format);
  return with_layout(layout, [&]<class Type>() {
    const Sections at = Type::sections(spec);
    constexpr int64_t none = Sections::none;
    return lowbit_weight{
        static_cast<const uint8_t*>(data), at.rows, at.row_bytes, at.columns, spec.n, spec.k, spec.group_size,
        coded ? at.column_scale : none, coded ? at.column_sum : none, coded && spec.group_size ? at.group_scale : none,
        spec.asymmetric ? at.zero : none, at.codes, static_cast<int32_t>(spec.format), static_cast<int32_t>(layout),
        bits(spec.format), spec.asymmetric};
  });
}

lowbit_blocked_weight blocked(const BlockedWeight& weight) {
  return {weight.numel, weight.block_size, tensor(weight.codes), tensor(weight.absmax), tensor(weight.scale_codes),
          tensor(weight.code_map), tensor(weight.offset), static_cast<int32_t>(weight.format)};
}

}  // namespace

Call<LinearArgs>::Call(const LinearArgs& args) {
  const WeightSpec& spec = args.weight_spec;
  const auto given = [&](const void* data, DType dtype, std::initializer_list<int64_t> shape) {
    return data ? dense(data, dtype, args.place.device, shape) : TensorView{};
  };
  // x and y are present even for `refuses` without data (lowbit.explain).
  views = {dense(args.x, args.dtype, args.place.device, {args.m, spec.k}), given(args.bias, args.bias_dtype, {spec.n}),
           given(args.mul, args.dtype, {args.m, spec.n}), given(args.add, args.dtype, {args.m, spec.n}),
           dense(args.y, args.dtype, args.place.device, {args.m, spec.n})};
  c = {head(args, sizeof c), weight(spec, args.weight), tensor(views[0]), tensor(views[1]), tensor(views[2]),
       tensor(views[3]), tensor(views[4]), static_cast<int32_t>(args.x_format), static_cast<int32_t>(args.activation)};
}

Call<QuantizeArgs>::Call(const QuantizeArgs& args) {
  static_assert(sizeof(Distortion) == 3 * sizeof(double));
  views[0] = on_host(args.distortion, DType::float64, 3);
  c = {head(args, sizeof c), weight(args.spec, args.packed.data), tensor(args.weight), tensor(args.importance),
       tensor(args.packed), tensor(views[0]), static_cast<int32_t>(args.mapping), static_cast<int32_t>(args.scale)};
}

Call<RepackArgs>::Call(const RepackArgs& args)
    : c{head(args, sizeof c), weight(args.spec, args.packed.data, args.layout),
        weight(args.spec, args.out.data, args.out_layout), tensor(args.packed), tensor(args.out)} {}

Call<DequantizeArgs>::Call(const DequantizeArgs& args) {
  views[0] = on_host(args.outside, DType::int64, 1);
  c = {head(args, sizeof c), weight(args.spec, args.packed.data, args.layout), tensor(args.packed), tensor(args.out),
       tensor(args.indices), tensor(views[0])};
}

Call<AllFiniteArgs>::Call(const AllFiniteArgs& args) {
  views[0] = on_host(args.result, DType::boolean, 1);
  c = {head(args, sizeof c), tensor(args.tensor), tensor(views[0])};
}

Call<BlocksLinearArgs>::Call(const BlocksLinearArgs& args)
    : c{head(args, sizeof c), blocked(args.weight), tensor(args.x), tensor(args.bias), tensor(args.y)} {}

Call<BlocksDequantizeArgs>::Call(const BlocksDequantizeArgs& args)
    : c{head(args, sizeof c), blocked(args.weight), tensor(args.out), args.begin} {}

Call<Int8LinearArgs>::Call(const Int8LinearArgs& args)
    : c{head(args, sizeof c), tensor(args.x), tensor(args.weight), tensor(args.row_scale), tensor(args.column_scale),
        tensor(args.bias), tensor(args.y)} {}

Call<OptimStepArgs>::Call(const OptimStepArgs& args) : c{} {
  const auto number = [&](const float* on_device) {
    return on_device ? dense(on_device, DType::float32, args.place.device, {1}) : TensorView{};
  };
  views[0] = number(args.grad_scale), views[1] = number(args.found_inf);
  c.call = head(args, sizeof c);
  c.tensors = reinterpret_cast<const lowbit_optim_tensor*>(args.tensors.data());
  c.tensor_count = static_cast<int64_t>(args.tensors.size()), c.block_size = args.block_size;
  c.grad_scale = tensor(views[0]), c.found_inf = tensor(views[1]);
#define LOWBIT_HYPER_FIELD(Type, name) c.name = args.hyper.name;
  LOWBIT_HYPER(LOWBIT_HYPER_FIELD)
#undef LOWBIT_HYPER_FIELD
  c.rule = static_cast<int32_t>(args.rule), c.moments = args.moments, c.format = static_cast<int32_t>(args.format);
  c.stochastic_rounding = args.stochastic_rounding, c.seed = args.seed;
}

Call<EncodeStateArgs>::Call(const EncodeStateArgs& args)
    : c{head(args, sizeof c), tensor(args.values), tensor(args.codes), tensor(args.scale), args.block_size,
        static_cast<int32_t>(args.format), args.is_signed} {}

Call<DecodeStateArgs>::Call(const DecodeStateArgs& args)
    : c{head(args, sizeof c), tensor(args.codes), tensor(args.scale), tensor(args.values), args.block_size,
        static_cast<int32_t>(args.format), args.is_signed} {}

Call<AttentionForwardArgs>::Call(const AttentionForwardArgs& args)
    : c{head(args, sizeof c), tensor(args.q), tensor(args.k), tensor(args.v), tensor(args.out), tensor(args.lse),
        tensor(args.max_scores), tensor(args.mask), tensor(args.sink), tensor(args.seed),
        tensor(args.lists.kv_num_blocks), tensor(args.lists.kv_indices), tensor(args.lists.full_kv_num_blocks),
        tensor(args.lists.full_kv_indices), args.lists.q_block, args.lists.kv_block, args.scale, args.dropout_p,
        args.causal} {}

Call<AttentionBackwardArgs>::Call(const AttentionBackwardArgs& args)
    : c{head(args, sizeof c), Call<AttentionForwardArgs>(args.forward).c, tensor(args.grad_out), tensor(args.grad_lse),
        tensor(args.grad_q), tensor(args.grad_k), tensor(args.grad_v), tensor(args.grad_mask), tensor(args.grad_sink)} {
}

Call<DecodeArgs>::Call(const DecodeArgs& args)
    : c{head(args, sizeof c), tensor(args.q), tensor(args.k), tensor(args.v), tensor(args.k_scale),
        tensor(args.v_scale), tensor(args.out), tensor(args.lse), tensor(args.mask), tensor(args.sink), args.position,
        args.window, args.scale, args.causal, args.rotated} {}

Call<KvQuantizeArgs>::Call(const KvQuantizeArgs& args)
    : c{head(args, sizeof c), tensor(args.x), tensor(args.codes), tensor(args.scale), args.rotate} {}

Call<KvDequantizeArgs>::Call(const KvDequantizeArgs& args)
    : c{head(args, sizeof c), tensor(args.codes), tensor(args.scale), tensor(args.x), args.rotated} {}

}  // namespace lowbit::external
