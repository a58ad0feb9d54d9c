# SPDX-License-Identifier: Apache-2.0
"""The schemas of the ops: exported programs name them, so that a changed one is a file that does not load."""

from __future__ import annotations

import pytest
import torch

import lowbit  # noqa: F401  registers them
from lowbit import _C

_SCORES = (
    "float scale, bool causal, Tensor? mask, float dropout_p, Tensor? seed, int[] score_mod, Tensor[] score_captured, "
)
_MASKS = "int[] mask_mod, Tensor[] mask_captured, Tensor[] blocks, int[] block_size, Tensor? sink, "
SCHEMAS = (
    "linear(Tensor x, Tensor weight, int n, int k, int format, int group_size, bool asymmetric, int x_format, "
    "Tensor? bias=None, int activation=0, Tensor? mul=None, Tensor? add=None, int row=0) -> Tensor",
    "gather_linear(Tensor x, Tensor weight, Tensor index, int n, int k, int format, int group_size, bool asymmetric, "
    "int x_format, Tensor? bias=None) -> Tensor",
    "experts(Tensor x, Tensor gate_up, Tensor down, Tensor index, Tensor weights, int[] gate_up_args, int[] down_args, "
    "int activation, bool gated=True, bool interleaved=False, float alpha=1., float limit=0., float up_offset=0., "
    "Tensor? gate_up_bias=None, Tensor? down_bias=None) -> Tensor",
    "dequantize(Tensor weight, int n, int k, int format, int group_size, bool asymmetric, Tensor? like=None) -> Tensor",
    "embedding(Tensor weight, Tensor indices, Tensor like, int n, int k, int format, int group_size, bool asymmetric, "
    "int layout) -> Tensor",
    "fake_quantize(Tensor weight, int format, int group_size, int mapping, Tensor? scale=None, Tensor? zero=None, "
    "bool codes=False) -> (Tensor, Tensor, Tensor)",
    "fake_quantize_backward_(Tensor(a!) grad, Tensor weight, Tensor scale, Tensor zero, int format, int group_size, "
    "bool scale_wanted) -> Tensor",
    "fake_quantize_activations(Tensor x, int x_format, int group_size) -> Tensor",
    "float8_cast(Tensor x, bool e5m2, int dim, bool power_of_2, bool bfloat16) -> (Tensor, Tensor)",
    "int8_pack(Tensor weight) -> Tensor",
    "block_sparse_linear(Tensor x, Tensor values, Tensor crow_indices, Tensor col_indices, Tensor? bias=None) "
    "-> Tensor",
    f"attention_forward(Tensor q, Tensor k, Tensor v, {_SCORES}{_MASKS}bool want_max_scores=False, bool real_out=False) "
    "-> (Tensor, Tensor, Tensor)",
    "attention_backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor grad_out, Tensor? grad_lse, "
    f"{_SCORES}bool[] score_captured_needs, {_MASKS}bool mask_needs, bool sink_needs) -> Tensor[]",
    "decode(Tensor q, Tensor k, Tensor v, float scale, Tensor? k_scale, Tensor? v_scale, bool rotated, bool causal, "
    "SymInt position, int window, SymInt v_columns, Tensor? mask=None, Tensor? sink=None, SymInt length=-1) "
    "-> Tensor",
    "kv_quantize_(Tensor x, Tensor(a!) codes, Tensor(b!) scale, bool rotate, SymInt first=-1) -> ()",
    "kv_dequantize_(Tensor codes, Tensor scale, Tensor(a!) x, bool rotated) -> ()",
    "rms_norm(Tensor x, Tensor weight, float eps, float offset, Tensor? add=None) -> Tensor",
    "rope_append_(Tensor qkv, Tensor cos, Tensor sin, Tensor(a!) keys, Tensor(b!) values, SymInt start, "
    "Tensor? q_weight=None, Tensor? k_weight=None, float eps=0., float offset=0., "
    "int rotation=0, bool grouped=False, bool norm_behind=False, bool gated=False) -> Tensor",
    "run_program_(int[] program, Tensor[] constants, Tensor(a!)[] states, Tensor[] inputs, SymInt[] starts) -> Tensor",
    "route(Tensor logits, int k, int scoring, Tensor? correction=None, int groups=1, int groups_kept=1, "
    "int group_top=1, bool zero_outside=False, bool normalize=False, float eps=0., float least=0., float scale=1., "
    "Tensor? expert_scale=None) -> (Tensor, Tensor)",
    "sample(Tensor logits, Tensor? ids=None, float temperature=1., int top_k=0, float top_p=1., float min_p=0., "
    "float repetition_penalty=1., int seed=0, SymInt position=0) -> Tensor",
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, float offset=0., Tensor? add=None) -> Tensor",
    "pointwise(Tensor x, int function=0, float scale=1., Tensor? add=None, float positive=0., float negative=0., "
    "float linear=0.) -> Tensor",
    "gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? state=None, bool l2norm=False, "
    "float scale=1., Tensor? cu_seqlens=None) -> (Tensor, Tensor)",
    "gated_delta_rule_backward(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor grad_o, Tensor? state=None, "
    "Tensor? grad_final_state=None, bool l2norm=False, float scale=1., Tensor? cu_seqlens=None) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "gated_rms_norm(Tensor x, Tensor gate, Tensor weight, float eps, int group_size, bool sigmoid=False, "
    "bool gate_first=False) -> Tensor",
    "gated_rms_norm_backward(Tensor x, Tensor gate, Tensor weight, Tensor grad_y, float eps, int group_size, "
    "bool sigmoid=False, bool gate_first=False) -> (Tensor, Tensor, Tensor)",
    "causal_conv1d(Tensor x, Tensor weight, Tensor? bias=None, Tensor? state=None, bool silu=False, "
    "Tensor? cu_seqlens=None) -> (Tensor, Tensor)",
    "causal_conv1d_backward(Tensor x, Tensor weight, Tensor grad_y, Tensor? bias=None, Tensor? state=None, "
    "Tensor? grad_final_state=None, bool silu=False, Tensor? cu_seqlens=None) -> (Tensor, Tensor, Tensor, Tensor)",
    "ssd(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, float dt_min, float dt_max, Tensor? D=None, "
    "Tensor? dt_bias=None, Tensor? state=None, bool softplus=False, Tensor? cu_seqlens=None) -> (Tensor, Tensor)",
    "ssd_(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor(a!) state, float dt_min, float dt_max, "
    "Tensor? D=None, Tensor? dt_bias=None, bool softplus=False, Tensor? cu_seqlens=None) -> Tensor",
    "ssd_backward(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor grad_y, float dt_min, float dt_max, "
    "Tensor? D=None, Tensor? dt_bias=None, Tensor? state=None, Tensor? grad_final_state=None, bool softplus=False, "
    "Tensor? cu_seqlens=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "selective_scan(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, float dt_min, float dt_max, Tensor? D=None, "
    "Tensor? z=None, Tensor? dt_bias=None, Tensor? state=None, bool softplus=False, Tensor? cu_seqlens=None) -> "
    "(Tensor, Tensor)",
    "selective_scan_(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor(a!) state, float dt_min, float dt_max, "
    "Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None, bool softplus=False, Tensor? cu_seqlens=None) -> Tensor",
    "selective_scan_backward(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor grad_y, float dt_min, "
    "float dt_max, Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None, Tensor? state=None, "
    "Tensor? grad_final_state=None, bool softplus=False, Tensor? cu_seqlens=None) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "linear_cross_entropy(Tensor x, Tensor head, Tensor labels, int n, int k, int format, int group_size, "
    "bool asymmetric, int x_format, Tensor? bias=None, Tensor? row_weight=None, int ignore_index=-100, "
    "float scale=1., float softcap=0., float label_smoothing=0., float z_loss=0., bool grad_x=False, "
    "bool grad_head=False, bool grad_bias=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.partition("(")[0])
def test_the_schema_is_the_one_that_exported_programs_have(schema: str) -> None:
    name = schema.partition("(")[0]
    assert str(getattr(torch.ops.lowbit, name).default._schema) == f"lowbit::{schema}"


def test_every_op_that_is_registered_has_its_schema_here() -> None:
    assert [schema.partition("(")[0] for schema in SCHEMAS] == [
        row["op"].removeprefix("lowbit::") for row in _C.register_torch()
    ]
