# SPDX-License-Identifier: Apache-2.0
"""The GGUF architectures that are mixtures of experts; `architecture_of` finds the one of a file among all."""

from __future__ import annotations

from typing import Any

from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

from lowbit.checkpoints.gguf.architectures import (
    ARCHITECTURES,
    FREQUENCIES,
    LONG,
    ROOT_MEAN_SQUARE,
    SHORT,
    Architecture,
    has,
    layer_types,
    no_window,
    qwen3,
    window_of_all,
)
from lowbit.checkpoints.gguf.expert_keys import SIGMOID, SOFTMAX_OF_CHOSEN, ExpertKeys
from lowbit.checkpoints.gguf.file import GgufFile
from lowbit.checkpoints.gguf.further_layers import without_further_layers
from lowbit.checkpoints.gguf.latent_attention import DEEPSEEK_V2, DEEPSEEK_V3, scores_by_softmax
from lowbit.checkpoints.gguf.linear_attention import QWEN3NEXT, QWEN35, QWEN35MOE
from lowbit.checkpoints.gguf.metadata import Metadata
from lowbit.checkpoints.gguf.short_convolutions import LFM2, LFM2MOE
from lowbit.checkpoints.gguf.state_spaces import (
    FALCON_H1,
    FALCON_MAMBA,
    GRANITE,
    GRANITE_MOE,
    MAMBA,
    MAMBA2,
    NEMOTRON_H,
    NEMOTRON_H_MOE,
    is_falcon_mamba,
)

_EPSILON = ROOT_MEAN_SQUARE, "rms_norm_eps"
_MIXTRAL = "num_local_experts"


def _qwen2moe(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    return {"qkv_bias": has(keys, "attn_q.bias")} | no_window(keys, known)


def _olmoe(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    clipped = {"clip_qkv": keys.positive_or_none("attention.clamp_kqv")}
    return clipped | {"attention_bias": has(keys, "attn_q.bias")} | no_window(keys, known)


def _granitemoe(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    default = known["head_dim"] ** -0.5
    return {
        "attention_bias": has(keys, "attn_q.bias"),
        "attention_multiplier": keys.positive_or_none("attention.scale") or default,
        "embedding_multiplier": keys.positive_or_none("embedding_scale") or 1.0,
        "residual_multiplier": keys.positive_or_none("residual_scale") or 1.0,
        "logits_scaling": keys.positive_or_none("logit_scale") or 1.0,
    } | no_window(keys, known)


def _gpt_oss(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    rope = known["rope_parameters"]
    if rope["rope_type"] == "yarn":
        rope = rope | {"truncate": False}  # llama.cpp rounds the ends of the ramp to whole columns
    return {
        "rope_parameters": rope,
        "attention_bias": has(keys, "attn_q.bias"),
        "sliding_window": keys.count("attention.sliding_window"),
        "layer_types": layer_types(keys, known, every=2),
    }


def _glm4moe(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    told = {"attention_bias": has(keys, "attn_q.bias"), "use_qk_norm": has(keys, "attn_q_norm.weight")}
    told |= {"num_nextn_predict_layers": 0}
    return told | without_further_layers(keys, known) | no_window(keys, known)


MIXTURES = {
    "llama": Architecture(
        model_type="mixtral",
        epsilon=_EPSILON,
        rope_tensors=(FREQUENCIES, SHORT, LONG),
        more=window_of_all,
        experts=ExpertKeys(count=_MIXTRAL, inner="intermediate_size", norm_by_default=True),
        tensors=LlamaTensorProcessor,
    ),
    "qwen2moe": Architecture(
        model_type="qwen2_moe",
        epsilon=_EPSILON,
        more=_qwen2moe,
        experts=ExpertKeys(
            count="num_experts",
            inner="moe_intermediate_size",
            norm="norm_topk_prob",
            norm_by_default=False,
            shared_inner="shared_expert_intermediate_size",
        ),
    ),
    "qwen3moe": Architecture(
        model_type="qwen3_moe",
        epsilon=_EPSILON,
        more=qwen3,
        experts=ExpertKeys(
            count="num_experts", inner="moe_intermediate_size", norm="norm_topk_prob", norm_by_default=True
        ),
    ),
    "olmoe": Architecture(
        model_type="olmoe",
        epsilon=_EPSILON,
        more=_olmoe,
        experts=ExpertKeys(
            count="num_experts", inner="intermediate_size", norm="norm_topk_prob", norm_by_default=False
        ),
    ),
    "granitemoe": Architecture(
        model_type="granitemoe",
        epsilon=_EPSILON,
        more=_granitemoe,
        experts=ExpertKeys(count=_MIXTRAL, inner="intermediate_size", norm_by_default=True),
        tensors=LlamaTensorProcessor,
        names={"ffn_gate_inp.weight": "block_sparse_moe.router.weight"},
    ),
    "gpt-oss": Architecture(
        model_type="gpt_oss",
        epsilon=_EPSILON,
        more=_gpt_oss,
        experts=ExpertKeys(count=_MIXTRAL, inner="intermediate_size", scores=SOFTMAX_OF_CHOSEN),
        names={"attn_sinks.weight": "self_attn.sinks"},
    ),
    "glm4moe": Architecture(
        model_type="glm4_moe",
        epsilon=_EPSILON,
        partial_rotary=True,
        more=_glm4moe,
        experts=ExpertKeys(
            count="n_routed_experts",
            inner="moe_intermediate_size",
            scores=SIGMOID,
            norm="norm_topk_prob",
            norm_by_default=False,
            scale="routed_scaling_factor",
            shared_count="n_shared_experts",
            groups="n_group",
            used_groups="topk_group",
            dense_layers="first_k_dense_replace",
        ),
        names={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
    ),
    "minimax-m2": Architecture(
        model_type="minimax_m2",
        epsilon=_EPSILON,
        partial_rotary=True,
        more=no_window,
        experts=ExpertKeys(count=_MIXTRAL, inner="intermediate_size", scores=SIGMOID, norm_by_default=True),
        names={"exp_probs_b.bias": "mlp.e_score_correction_bias"},
    ),
    "deepseek2": DEEPSEEK_V3,
    "qwen35moe": QWEN35MOE,
    "qwen3next": QWEN3NEXT,
    "lfm2moe": LFM2MOE,
    "granitehybrid": GRANITE_MOE,
    "nemotron_h_moe": NEMOTRON_H_MOE,
}
"""Architectures with experts by ``general.architecture``."""
DENSE = ARCHITECTURES | {
    "qwen35": QWEN35,
    "lfm2": LFM2,
    "mamba": MAMBA,
    "mamba2": MAMBA2,
    "granitehybrid": GRANITE,
    "falcon-h1": FALCON_H1,
    "nemotron_h": NEMOTRON_H,
}
"""Architectures without experts by ``general.architecture``."""


def architecture_of(file: GgufFile) -> Architecture:
    """Return the architecture of a file. A ``llama`` with experts is a Mixtral; a ``deepseek2`` is a DeepSeek V3, or a
    V2 if its router scores by softmax; a ``mamba`` with norms is a Falcon Mamba.

    Raises:
        ValueError: lowbit does not read this architecture. The message names the file.
    """
    name = file.architecture
    count = file.value(f"{name}.expert_count", 0)
    found = MIXTURES.get(name) if count or name not in DENSE else DENSE[name]
    if found is not None:
        if found is MAMBA and is_falcon_mamba(file):
            return FALCON_MAMBA
        return DEEPSEEK_V2 if found is DEEPSEEK_V3 and scores_by_softmax(file) else found
    if count and name in DENSE:
        raise ValueError(
            f"{file.paths[0]}: {name}.expert_count must be 0 (experts are read in {', '.join(MIXTURES)}), got {count!r}"
        )
    raise ValueError(
        f"{file.paths[0]}: general.architecture must be one of {', '.join(DENSE | MIXTURES)}, got {name!r}"
    )
