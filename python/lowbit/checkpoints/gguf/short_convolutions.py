# SPDX-License-Identifier: Apache-2.0
"""lfm2 and lfm2moe: layers of short convolutions or attention. llama.cpp's converter takes a dimension from the
convolutions; layers without heads of keys have one."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers.modeling_gguf_pytorch_utils import GGUFTensor, TensorProcessor

from lowbit.checkpoints.gguf.architectures import ROOT_MEAN_SQUARE, Architecture, has, no_window
from lowbit.checkpoints.gguf.attention_keys import attends, heads_of_some_layers
from lowbit.checkpoints.gguf.expert_keys import SIGMOID, ExpertKeys
from lowbit.checkpoints.gguf.metadata import Metadata

_ENDS = ".weight", ".bias"
_CONV = "shortconv.conv.weight"


class ShortConvTensors(TensorProcessor):
    """Undoes the converter's change, and makes it again."""

    def process(self, weights: np.ndarray, name: str, **kwargs: Any) -> GGUFTensor:
        """Return the values of the model for those of the file."""
        return GGUFTensor(weights[:, None] if name.endswith(_CONV) else weights, name, {})

    def restore(self, values: np.ndarray, name: str) -> np.ndarray:
        """Return the values of the file for those of the model."""
        return values[:, 0] if name.endswith(_CONV) else values


def _of_both(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    return {
        "layer_types": ["full_attention" if attention else "conv" for attention in attends(keys)],
        "conv_L_cache": keys.count("shortconv.l_cache"),
        "conv_bias": has(keys, "shortconv.in_proj.bias"),
    } | no_window(keys, known)


def _lfm2(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    return {"block_auto_adjust_ff_dim": False} | _of_both(keys, known)


def _lfm2moe(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    return {"use_expert_bias": has(keys, "exp_probs_b.bias")} | _of_both(keys, known)


_NAMES = {
    "attn_norm.weight": "operator_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "attn_output.weight": "self_attn.out_proj.weight",
    **{f"attn_{of}{_ENDS[0]}": f"self_attn.{of}_proj.weight" for of in "qkv"},
    **{f"attn_{of}_norm.weight": f"self_attn.{of}_layernorm.weight" for of in "qk"},
    **{f"shortconv.{of}{end}": f"conv.{of}{end}" for of in ("in_proj", "conv", "out_proj") for end in _ENDS},
    **{
        f"ffn_{of}{_ENDS[0]}": f"feed_forward.{to}{_ENDS[0]}"
        for of, to in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
    },
}
_LFM2 = dict(
    epsilon=(ROOT_MEAN_SQUARE, "norm_eps"),
    heads=heads_of_some_layers,
    tensors=ShortConvTensors,
    outside={"token_embd_norm.weight": "model.embedding_norm.weight"},  # the norm in front of the head
)
LFM2 = Architecture(model_type="lfm2", more=_lfm2, names=_NAMES, **_LFM2)
LFM2MOE = Architecture(
    model_type="lfm2_moe",
    more=_lfm2moe,
    experts=ExpertKeys(
        count="num_experts",
        inner="moe_intermediate_size",
        scores=SIGMOID,
        norm="norm_topk_prob",
        norm_by_default=True,
        scale="routed_scaling_factor",
        dense_layers="num_dense_layers",
    ),
    names=_NAMES | {"ffn_gate_inp.weight": "feed_forward.gate.weight", "exp_probs_b.bias": "feed_forward.expert_bias"},
    **_LFM2,
)
