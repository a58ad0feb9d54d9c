// SPDX-License-Identifier: Apache-2.0
// The op decode by its contract: into a given tensor, with mods and a log-sum-exp, which lowbit::decode has not.
#include "ops/decode.hpp"

#include <pybind11/stl.h>

#include <utility>

#include "bindings/tensor_caster.hpp"
#include "cuda/decode/prompt.hpp"
#include "ops/attention_mods.hpp"

namespace lowbit {
namespace {

using Code = std::vector<int64_t>;

void decode_into(py::handle q, py::handle k, py::handle v, py::handle out, double scale, py::handle k_scale,
                 py::handle v_scale, bool rotated, bool causal, int64_t position, int64_t window, py::handle mask,
                 py::handle sink, py::handle lse, const Code& score_mod, const py::list& score_captured,
                 const Code& mask_mod, const py::list& mask_captured) {
  const TensorArgument q_argument(q, "decode: q"), k_argument(k, "decode: k"), v_argument(v, "decode: v"),
      out_argument = output(out, "decode: out");
  const TensorArgument k_scale_argument = optional(k_scale, "decode: k_scale"),
                       v_scale_argument = optional(v_scale, "decode: v_scale");
  const TensorArgument mask_argument = optional(mask, "decode: mask"), sink_argument = optional(sink, "decode: sink");
  const TensorArgument lse_argument(lse, "decode: lse", Access::write, true);
  const TensorArguments score_tensors(score_captured, "score_captured"), mask_tensors(mask_captured, "mask_captured");
  const AttentionMods mods("decode", {score_mod, score_tensors.views}, {mask_mod, mask_tensors.views});
  const py::gil_scoped_release nogil;
  DecodeArgs args{.q = *q_argument,
                  .k = *k_argument,
                  .v = *v_argument,
                  .k_scale = *k_scale_argument,
                  .v_scale = *v_scale_argument,
                  .out = *out_argument,
                  .lse = *lse_argument,
                  .mask = *mask_argument,
                  .sink = *sink_argument,
                  .scale = scale,
                  .causal = causal,
                  .position = position,
                  .window = window,
                  .rotated = rotated,
                  .score_mod = mods.score_mod(),
                  .mask_mod = mods.mask_mod()};
  check_args(args);
  if (args.out.numel()) run(args);
}

}  // namespace

void register_decode(py::module_& m) {
  using py::arg;
  m.def("decode", decode_into, arg("q"), arg("k"), arg("v"), arg("out"), arg("scale"), arg("k_scale") = py::none(),
        arg("v_scale") = py::none(), arg("rotated") = false, arg("causal") = false, arg("position") = 0,
        arg("window") = 0, arg("mask") = py::none(), arg("sink") = py::none(), arg("lse") = py::none(),
        arg("score_mod") = Code(), arg("score_captured") = py::list(), arg("mask_mod") = Code(),
        arg("mask_captured") = py::list(),
        "Write into ``out`` what lowbit::decode returns, and into ``lse`` the log-sum-exp of each row; mods are score "
        "programs and their tensors, whose q is ``position + i``.");
  m.def("max_decoded_bytes", [](int64_t bytes) { return std::exchange(cuda::max_decoded_bytes, bytes); },
        arg("bytes"), "Set how much of a cache a prompt on an NVIDIA GPU decodes at a time; return what it was.");
}

}  // namespace lowbit
