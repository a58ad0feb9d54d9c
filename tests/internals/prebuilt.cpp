// SPDX-License-Identifier: Apache-2.0
// Code that CUDA rows make before they run: kernels by NVRTC, and plans of cuDNN.
#include <pybind11/stl.h>

#include "bindings/tensor_caster.hpp"
#include "cuda/attention/kind.hpp"
#include "cuda/cudnn/call.hpp"
#include "cuda/decode/kind.hpp"
#include "cuda/sources.hpp"
#include "ops/attention_mods.hpp"
#include "sim/memory.hpp"

namespace lowbit {
namespace {

using Code = std::vector<int64_t>;

py::dict facts_of(const cuda::Source& source, const std::string& architecture) {
  const cuda::Prebuilt made = cuda::prebuild(source, architecture);
  py::dict facts;
  facts["name"] = source.name, facts["path"] = made.path, facts["log"] = made.log;
  return facts;
}

py::list prebuild(const std::string& architecture, std::string_view only, bool every_linear) {
  py::list all;
  for (const cuda::Source& source : every_linear ? cuda::linear_sources(architecture)
                                                 : cuda::common_sources(architecture))
    if (source.name.starts_with(only)) all.append(facts_of(source, architecture));
  return all;
}

// A plan on the device that a text describes, read back from its image.
py::dict facts_of_plan(const cuda::AttentionShape& shape, const std::string& device, int compute_capability) {
  const cuda::CudnnDevice on{.description = device, .compute_capability = compute_capability};
  py::dict facts;
  const py::gil_scoped_release nogil;
  const cuda::Plan made = cuda::make_plan(shape, on);
  const std::string image = made.graph ? cuda::image_of(made) : "";
  const cuda::Plan again = made.graph ? cuda::read_plan(image, on) : made;
  const cuda::Plan cut = made.graph ? cuda::read_plan(image.substr(0, image.size() / 2), on) : made;
  const py::gil_scoped_acquire gil;
  facts["refused"] = made.refused, facts["workspace"] = made.workspace, facts["image"] = py::bytes(image);
  facts["again"] = again.refused, facts["workspace_again"] = again.workspace, facts["cut"] = cut.refused;
  facts["max_workspace"] = cuda::max_workspace(shape);
  facts["tensors"] = std::vector<int>(made.tensors.begin(), made.tensors.end());
  facts["tensors_again"] = std::vector<int>(again.tensors.begin(), again.tensors.end());
  return facts;
}

// For dense tensors [batch, heads, length, e].
py::dict attention_plan(const std::string& device, int compute_capability, const std::array<int64_t, 7>& sizes,
                        std::string_view dtype, bool causal, bool backward) {
  const auto [batch, heads, kv_heads, q_length, kv_length, e, ev] = sizes;
  cuda::AttentionShape shape{.batch = batch, .heads = heads, .kv_heads = kv_heads, .q_length = q_length,
                             .kv_length = kv_length, .e = e, .ev = ev,
                             .dtype = dtype == name_of(DType::float16) ? DType::float16 : DType::bfloat16,
                             .causal = causal, .backward = backward};
  for (int i = 0; i < cuda::AttentionShape::kRows; i++) {
    const auto [b, h, length, width] = shape.sizes(static_cast<cuda::AttentionShape::Tensor>(i));
    shape.stride[static_cast<std::size_t>(i)] = {h * length * width, length * width, width};
  }
  return facts_of_plan(shape, device, compute_capability);
}

// What cuDNN gets of a call of `op`, with the facts of its plan if a device is described.
py::dict cudnn_call(const std::string& op, py::handle q, py::handle k, py::handle v, py::handle out, py::handle lse,
                    py::handle mask, bool causal, int64_t position, int64_t window, const std::string& device,
                    int compute_capability, bool clear) {
  const TensorArgument q_argument(q, "q"), k_argument(k, "k"), v_argument(v, "v"), out_argument = output(out, "out"),
      lse_argument(lse, "lse", Access::write, true), mask_argument = optional(mask, "mask");
  const TensorView& given = *mask_argument;
  cuda::CudnnCall call;
  Place place;
  if (op == "decode") {
    DecodeArgs args{.q = *q_argument, .k = *k_argument, .v = *v_argument, .k_scale = {}, .v_scale = {},
                    .out = *out_argument, .lse = *lse_argument, .mask = given, .sink = {}, .scale = 0.5,
                    .causal = causal, .position = position, .window = window};
    check_args(args);
    call = cuda::cudnn_call(args), place = args.place;
  } else {
    AttentionForwardArgs args{.q = *q_argument, .k = *k_argument, .v = *v_argument, .out = *out_argument,
                              .lse = *lse_argument, .mask = stretched(given, *q_argument, *k_argument), .scale = 0.5,
                              .causal = causal};
    check_args(args);
    call = cuda::cudnn_call(args), place = args.place;
  }
  const cuda::AttentionShape& shape = call.shape;
  if (clear) {
    const sim::Open open(place.device.index, place.stream);
    cuda::clear_hidden_rows(call, place);
  }
  py::dict facts = device.empty() ? py::dict() : facts_of_plan(shape, device, compute_capability);
  py::list addresses;
  for (void* tensor : call.tensors) addresses.append(reinterpret_cast<uintptr_t>(tensor));
  facts["addresses"] = addresses;
  facts["sizes"] = std::vector<int64_t>{shape.batch,    shape.heads,     shape.kv_heads, shape.q_length,
                                        shape.kv_length, shape.e,        shape.ev};
  facts["bias_size"] = shape.bias_size, facts["bias_stride"] = shape.bias_stride, facts["scale"] = shape.scale;
  facts["window"] = shape.window, facts["causal"] = shape.causal, facts["ends_together"] = shape.ends_together;
  facts["has_lse"] = shape.has_lse, facts["strides"] = shape.stride;
  return facts;
}

py::list prebuild_attention(const std::string& architecture, const std::string& dtype, int e, int ev, const Code& score,
                            const py::list& score_captured, const Code& mask, const py::list& mask_captured) {
  const TensorArguments of_score(score_captured, "score_captured"), of_mask(mask_captured, "mask_captured");
  const AttentionMods mods("prebuild_attention", {score, of_score.views}, {mask, of_mask.views});
  const DType type = dtype == "float16" ? DType::float16 : DType::bfloat16;
  const cuda::AttentionKind kind{.dtype = type, .e = e, .ev = ev, .score = mods.score_mod(), .mask = mods.mask_mod()};
  py::list all;
  using enum cuda::AttentionKernel;
  for (const auto kernel : {forward, backward, captured, forward_wgmma, prompt_wgmma, backward_wgmma})
    if ((kernel != captured || kind.score) && (kernel < forward_wgmma || architecture == cuda::kHopper) &&
        (kernel != backward_wgmma || kind.gathers() != cuda::Gathers::by_score))
      all.append(facts_of(cuda::attention_source(kind, kernel), architecture));
  return all;
}

py::dict prebuild_decode(const std::string& architecture, const std::string& cache, int e, int ev, int rows,
                         const Code& score, const py::list& score_captured, const Code& mask,
                         const py::list& mask_captured) {
  const TensorArguments of_score(score_captured, "score_captured"), of_mask(mask_captured, "mask_captured");
  const AttentionMods mods("prebuild_decode", {score, of_score.views}, {mask, of_mask.views});
  const DType type = cache == "int8" ? DType::int8 : cache == "int4" ? DType::uint8
                     : cache == "float16" ? DType::float16 : DType::bfloat16;
  const cuda::DecodeShape shape{type, static_cast<int>(kv_padded(e) / kKvGroup),
                                static_cast<int>(kv_padded(ev) / kKvGroup), 1, rows / 8};
  return facts_of(cuda::decode_source({shape, mods.score_mod(), mods.mask_mod()}), architecture);
}

}  // namespace

void register_prebuilt(py::module_& m) {
  m.def("attention_plan", attention_plan, py::arg("device"), py::arg("compute_capability"), py::arg("sizes"),
           py::arg("dtype"), py::arg("causal"), py::arg("backward"),
           "Make a plan of cuDNN without a GPU, for the device that `device` describes (JSON, as cuDNN writes it) and "
           "sizes (batch, heads, kv_heads, q_length, kv_length, e, ev); write its image and read it back.");
  m.def("cudnn_call", cudnn_call, py::arg("op"), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("out"),
        py::arg("lse") = py::none(), py::arg("mask") = py::none(), py::arg("causal") = false, py::arg("position") = 0,
        py::arg("window") = 0, py::arg("device") = "", py::arg("compute_capability") = 0, py::arg("clear") = false,
        "What a plan of cuDNN gets of a call of attention_forward or decode, scaled by 0.5: sizes, strides, options, and the "
        "address of each tensor or 0 (cuda/cudnn/plan.hpp). With a device the plan is made, and `tensors` are those that "
        "it takes. `clear`, on a simulated device: rows that the mask hides are cleared, as after a call.");
  m.def("prebuild", prebuild, py::arg("architecture"), py::arg("only"), py::arg("every_linear") = false,
        "Compile the sources of `_C.cuda.prebuild`, or all of linear, whose names begin with `only` into the cache; "
        "return name, path and NVRTC's log.");
  m.def("prebuild_attention", prebuild_attention, py::arg("architecture"), py::arg("dtype"), py::arg("e"),
           py::arg("ev"), py::arg("score_mod") = Code(), py::arg("score_captured") = py::list(),
           py::arg("mask_mod") = Code(), py::arg("mask_captured") = py::list(),
           "Likewise attention with these programs: forward, backward, gradients of what score_mod captured.");
  m.def("prebuild_decode", prebuild_decode, py::arg("architecture"), py::arg("cache"), py::arg("e"), py::arg("ev"),
           py::arg("rows"), py::arg("score_mod") = Code(), py::arg("score_captured") = py::list(),
           py::arg("mask_mod") = Code(), py::arg("mask_captured") = py::list(),
           "Likewise decode of bfloat16 queries, 8 or 16 rows a CTA, over int8, int4, bfloat16 or float16.");
}

}  // namespace lowbit
