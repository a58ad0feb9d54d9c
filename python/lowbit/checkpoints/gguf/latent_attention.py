# SPDX-License-Identifier: Apache-2.0
"""deepseek2: mixtures of experts with multi-head latent attention. DeepSeek V2 scores experts by softmax; DeepSeek V3,
R1, Kimi K2, GLM 4.7 Flash and others by sigmoid.

A token is projected to a latent vector of ``kv_lora_rank`` numbers and a rotated key of ``rope.dimension_count``, both
shared by all heads. ``kv_b_proj`` has the rows of each head's keys, then those of its values. Files since April 2025
divide it, for attention over the latent vectors themselves: ``attn_k_b [heads, rank, keys]``, which is transposed, and
``attn_v_b [heads, values, rank]``. Their sizes of heads are those of such attention, which has one head of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from lowbit.checkpoints.gguf.architectures import ROOT_MEAN_SQUARE, Architecture, has
from lowbit.checkpoints.gguf.attention_keys import rope_parameters
from lowbit.checkpoints.gguf.expert_keys import SIGMOID, SOFTMAX, ExpertKeys
from lowbit.checkpoints.gguf.file import GgufFile
from lowbit.checkpoints.gguf.further_layers import without_further_layers
from lowbit.checkpoints.gguf.joined_tensors import JoinedTensors
from lowbit.checkpoints.gguf.metadata import Metadata

_KEYS, _VALUES = "attn_k_b.weight", "attn_v_b.weight"
_GLM_LAYERS, _GLM_WORDS = (47, 48), 154880
"""The numbers of layers and words of GLM 4.7 Flash, whose first files do not name the sigmoid."""


def scores_by_softmax(file: GgufFile) -> bool:
    """Return whether the router of a deepseek2 file scores by softmax."""
    scores = file.value("deepseek2.expert_gating_func", 0)
    if scores:
        return scores == SOFTMAX
    words = file.tensors.get("token_embd.weight")
    is_glm = words is not None and words.shape[0] == _GLM_WORDS
    return not (is_glm and file.value("deepseek2.block_count", 0) in _GLM_LAYERS)


def _heads(keys: Metadata, architecture: Architecture) -> dict[str, Any]:
    """Return the attributes of attention."""
    heads, rank = keys.count("attention.head_count"), keys.count("attention.kv_lora_rank")
    rotated = keys.count("rope.dimension_count")
    if has(keys, _KEYS):
        key, value = keys.count("attention.key_length_mla"), keys.count("attention.value_length_mla")
        keys.only("attention.head_count_kv", 1, heads, reason="all heads share the latent vectors")
        keys.only("attention.key_length", rank + rotated, reason="a latent vector and a rotated key")
        keys.only("attention.value_length", rank, reason="a latent vector")
    else:
        key, value = keys.count("attention.key_length"), keys.count("attention.value_length")
        keys.only("attention.head_count_kv", heads, reason="each head has keys of its own")
    if key <= rotated:
        name = "attention.key_length_mla" if has(keys, _KEYS) else "attention.key_length"
        keys.refuse(name, f"more than the {rotated} rotated columns", key)
    return {
        "num_key_value_heads": heads,
        "kv_lora_rank": rank,
        "q_lora_rank": keys.count("attention.q_lora_rank") if has(keys, "attn_q_a.weight") else None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "rope_parameters": rope_parameters(keys, architecture, rotated),
    }


def _deepseek_v2(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    in_groups = keys.value("expert_group_count", 0) not in (0, 1)
    return {"topk_method": "group_limited_greedy" if in_groups else "greedy"}


def _deepseek_v3(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    return {"num_nextn_predict_layers": 0} | without_further_layers(keys, known)


def _join(config: PreTrainedConfig, tensors: Sequence[Tensor]) -> Tensor:
    keys, values = tensors
    return torch.cat([keys.mT, values], dim=1).flatten(0, 1)


def _split(config: PreTrainedConfig, matrix: Tensor) -> tuple[Tensor, ...]:
    of_heads = matrix.unflatten(0, (config.num_attention_heads, -1))
    keys, values = of_heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
    return keys.mT, values


_ATTENTION = dict(
    epsilon=(ROOT_MEAN_SQUARE, "rms_norm_eps"),
    scales_scores=True,
    heads=_heads,
    joined={"self_attn.kv_b_proj.weight": JoinedTensors((_KEYS, _VALUES), _join, _split)},
)
_EXPERTS = dict(
    count="n_routed_experts",
    inner="moe_intermediate_size",
    norm_by_default=False,
    scale="routed_scaling_factor",
    shared_count="n_shared_experts",
    groups="n_group",
    used_groups="topk_group",
    dense_layers="first_k_dense_replace",
)
DEEPSEEK_V2 = Architecture(
    model_type="deepseek_v2", more=_deepseek_v2, experts=ExpertKeys(scores=SOFTMAX, **_EXPERTS), **_ATTENTION
)
DEEPSEEK_V3 = Architecture(
    model_type="deepseek_v3",
    more=_deepseek_v3,
    experts=ExpertKeys(scores=SIGMOID, norm="norm_topk_prob", **_EXPERTS),
    names={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
    **_ATTENTION,
)
