// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_mods.hpp"

#include <pybind11/stl.h>

#include "bindings/register.hpp"
#include "bindings/tensor_caster.hpp"

namespace lowbit {
namespace {

using Code = std::vector<int64_t>;

// The objects that the views of the mods point into.
class Call {
 public:
  Call(const char* op, const Code& score_mod, const py::list& score_captured, const Code& mask_mod, const py::list& mask_captured,
       const py::list& blocks, std::pair<int64_t, int64_t> block_size)
      : score_captured_(score_captured, "score_captured"), mask_captured_(mask_captured, "mask_captured"),
        blocks_(blocks, "blocks", Access::read, true),
        mods_(op, {score_mod, score_captured_.views}, {mask_mod, mask_captured_.views}, blocks_.views, block_size) {}
  const AttentionMods* operator->() const { return &mods_; }

 private:
  TensorArguments score_captured_, mask_captured_, blocks_;
  AttentionMods mods_;
};

void forward_into(py::handle q, py::handle k, py::handle v, py::handle out, py::handle lse, py::handle max_scores, double scale, bool causal,
                  py::handle mask, double dropout_p, uint64_t seed, const Code& score_mod, const py::list& score_captured, const Code& mask_mod,
                  const py::list& mask_captured, const py::list& blocks, std::pair<int64_t, int64_t> block_size, py::handle sink) {
  const TensorArgument q_argument(q, "attention_forward: q"), k_argument(k, "attention_forward: k"), v_argument(v, "attention_forward: v");
  const TensorArgument out_argument = output(out, "attention_forward: out");
  const TensorArgument lse_argument(lse, "attention_forward: lse", Access::write, true);
  const TensorArgument max_argument(max_scores, "attention_forward: max_scores", Access::write, true);
  const TensorArgument mask_argument = optional(mask, "attention_forward: mask"), sink_argument = optional(sink, "attention_forward: sink");
  const Call call("attention_forward", score_mod, score_captured, mask_mod, mask_captured, blocks, block_size);
  const py::gil_scoped_release nogil;
  attention_forward({.q = *q_argument, .k = *k_argument, .v = *v_argument, .out = *out_argument, .lse = *lse_argument,
                     .max_scores = *max_argument, .mask = *mask_argument, .sink = *sink_argument, .scale = scale, .causal = causal,
                     .dropout_p = dropout_p, .seed = seed, .score_mod = call->score_mod(), .mask_mod = call->mask_mod()},
                    call->lists);
}

void backward_into(py::handle q, py::handle k, py::handle v, py::handle out, py::handle lse, py::handle grad_out, py::handle grad_lse,
                   py::handle grad_q, py::handle grad_k, py::handle grad_v, double scale, bool causal, py::handle mask, double dropout_p,
                   uint64_t seed, const Code& score_mod, const py::list& score_captured, const py::list& score_captured_grads,
                   const Code& mask_mod, const py::list& mask_captured, const py::list& blocks, std::pair<int64_t, int64_t> block_size,
                   py::handle sink, py::handle grad_mask, py::handle grad_sink) {
  const TensorArgument q_argument(q, "attention_backward: q"), k_argument(k, "attention_backward: k"), v_argument(v, "attention_backward: v");
  const TensorArgument out_argument(out, "attention_backward: out"), lse_argument(lse, "attention_backward: lse");
  const TensorArgument grad_out_argument(grad_out, "attention_backward: grad_out");
  const TensorArgument grad_lse_argument = optional(grad_lse, "attention_backward: grad_lse");
  const TensorArgument grad_q_argument = output(grad_q, "attention_backward: grad_q"), grad_k_argument = output(grad_k, "attention_backward: grad_k");
  const TensorArgument grad_v_argument = output(grad_v, "attention_backward: grad_v");
  const TensorArgument mask_argument = optional(mask, "attention_backward: mask"), sink_argument = optional(sink, "attention_backward: sink");
  const TensorArgument grad_mask_argument(grad_mask, "attention_backward: grad_mask", Access::write, true);
  const TensorArgument grad_sink_argument(grad_sink, "attention_backward: grad_sink", Access::write, true);
  const TensorArguments captured_grads(score_captured_grads, "attention_backward: score_captured_grads", Access::write, true);
  const Call call("attention_backward", score_mod, score_captured, mask_mod, mask_captured, blocks, block_size);
  const py::gil_scoped_release nogil;
  attention_backward({.forward = {.q = *q_argument, .k = *k_argument, .v = *v_argument, .out = *out_argument, .lse = *lse_argument,
                                  .mask = *mask_argument, .sink = *sink_argument, .scale = scale, .causal = causal, .dropout_p = dropout_p,
                                  .seed = seed, .score_mod = call->score_mod(), .mask_mod = call->mask_mod()},
                      .grad_out = *grad_out_argument, .grad_lse = *grad_lse_argument, .grad_q = *grad_q_argument,
                      .grad_k = *grad_k_argument, .grad_v = *grad_v_argument, .grad_mask = *grad_mask_argument,
                      .grad_sink = *grad_sink_argument},
                     call->lists, captured_grads.views);
}

}  // namespace

void register_attention(py::module_& m) {
  using py::arg;
  m.def("attention_forward", forward_into, arg("q"), arg("k"), arg("v"), arg("out"), arg("lse").none(true), arg("max_scores").none(true), arg("scale"),
        arg("causal"), arg("mask"), arg("dropout_p"), arg("seed"), arg("score_mod"), arg("score_captured"), arg("mask_mod"),
        arg("mask_captured"), arg("blocks"), arg("block_size"), arg("sink"),
        R"(Write softmax(modified scores) v into ``out``, and the log-sum-exp and largest score of each row.

Args:
    q, k, v: ``[B, Hq, L, E]``, ``[B, Hkv, S, E]``, ``[B, Hkv, S, Ev]``: float32, bfloat16, float16 or float64, dense in the last dimension.
    out: ``[B, Hq, L, Ev]`` of the dtype of q, or float32 (float64 for float64 inputs), written.
    lse, max_scores: ``[B, Hq, L]`` float32 (float64 for float64 inputs), written, or None. lse is natural and includes the sink.
    scale: factor of q k^T.
    causal: query i sees keys 0 to i.
    mask: bool or floating ``[B, Hq, L, S]``, any strides, or None.
    dropout_p, seed: probability to drop, and the key of the random numbers.
    score_mod, score_captured: score program and its tensors; an empty list for none.
    mask_mod, mask_captured: likewise; asked in partial blocks, everywhere without ``blocks``.
    blocks: kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices (int32, the last two may be None), or an empty list.
    block_size: queries and keys of a block.
    sink: ``[Hq]`` float32 (float64), a logit without a value, or None.

Raises:
    ValueError, TypeError: an argument does not fit; the text names it.
    IndexError: a program reads out of range.
    NotImplementedError: no kernel row fits, or not the forced one.)");
  m.def("attention_backward", backward_into, arg("q"), arg("k"), arg("v"), arg("out"), arg("lse"), arg("grad_out"), arg("grad_lse"),
        arg("grad_q"), arg("grad_k"), arg("grad_v"), arg("scale"), arg("causal"), arg("mask"), arg("dropout_p"), arg("seed"), arg("score_mod"),
        arg("score_captured"), arg("score_captured_grads"), arg("mask_mod"), arg("mask_captured"), arg("blocks"), arg("block_size"), arg("sink"),
        arg("grad_mask"), arg("grad_sink"),
        R"(Write the gradients of attention_forward, whose arguments, ``out`` and ``lse`` it takes.

Args:
    grad_out, grad_lse: gradients of the results, in their dtypes; ``grad_lse`` may be None.
    grad_q, grad_k, grad_v: shapes and dtypes of q, k, v, written.
    score_captured_grads: per captured tensor None or a contiguous tensor of its shape, written; an empty list for none.
    grad_mask: float32 (float64) ``[B, Hq, L, S]`` with stride 0 where the mask is broadcast, added to, or None.
    grad_sink: ``[Hq]``, written, or None.)");
}

}  // namespace lowbit
