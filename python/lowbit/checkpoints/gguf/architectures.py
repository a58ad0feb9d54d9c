# SPDX-License-Identifier: Apache-2.0
"""The GGUF architectures, with the mapping of their metadata keys to the configuration of the transformers model.

Names, defaults and rules are those of llama.cpp (src/llama-model.cpp, src/models/), except where llama.cpp omits a part
of the model; docs/gguf.md lists these cases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers.modeling_gguf_pytorch_utils import TensorProcessor

from lowbit.checkpoints.gguf.counts import is_in_layer
from lowbit.checkpoints.gguf.divided_tensors import DividedTensor
from lowbit.checkpoints.gguf.expert_keys import ExpertKeys
from lowbit.checkpoints.gguf.joined_tensors import JoinedTensors
from lowbit.checkpoints.gguf.metadata import Metadata

FREQUENCIES, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
SIZES = ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count")
"""Keys that every file has."""
_SIZES = ("max_position_embeddings", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
ROOT_MEAN_SQUARE, _MEAN = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One architecture of GGUF files."""

    model_type: str
    """The ``model_type`` that transformers' ``AutoConfig`` takes."""
    epsilon: tuple[str, str]
    """The key of the norms' epsilon, and the attribute it sets."""
    sizes: tuple[str, ...] = _SIZES
    """The attributes set by the keys in `SIZES`; an empty name leaves a key to ``heads`` or ``more``."""
    has_dense_mlp: bool = True
    """Whether a layer may have an MLP without experts, and every file its size, ``feed_forward_length``."""
    rotary: bool = True
    partial_rotary: bool = False
    """Whether a part of a head's columns may be rotated."""
    own_head_dim: bool = True
    """Whether a head may have a number of columns other than embedding_length / head_count."""
    rope_tensors: tuple[str, ...] = ()
    """Tensors that are read into the configuration."""
    scales_scores: bool = False
    """Whether YaRN multiplies the scores too, by as much as ``rope.scaling.yarn_log_multiplier`` says."""
    heads: Callable[[Metadata, Architecture], dict[str, Any]] | None = None
    """Returns the attributes of attention, where it has other keys than most models."""
    more: Callable[[Metadata, dict[str, Any]], dict[str, Any]] | None = None
    """Returns the remaining attributes, given the metadata and the attributes known so far."""
    experts: ExpertKeys | None = None
    """How the keys of experts are taken, or None for a model without experts."""
    reads_weights: bool = False
    """Whether transformers' model reads the weights of layers itself, which must be float then."""
    tensors: type[TensorProcessor] | None = None
    """transformers' class that undoes the changes of llama.cpp's converter; None is the one that it has under the name
    of a dense architecture, and no change in a mixture of experts."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Parameters in a layer by the names of their tensors, where transformers' tables have none."""
    outside: Mapping[str, str] = field(default_factory=dict)
    """The same of parameters outside of layers, with their whole names."""
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Parameters in a layer whose rows are those of several tensors, one behind the other."""
    divided: Mapping[str, DividedTensor] = field(default_factory=dict)
    """Tensors of a layer whose rows are those of several parameters."""
    joined: Mapping[str, JoinedTensors] = field(default_factory=dict)
    """Parameters in a layer whose values some files divide into tensors of another order."""


def has(keys: Metadata, name: str) -> bool:
    return any(is_in_layer(tensor, name) for tensor in keys.file.tensors)


def no_window(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    """Check that attention has no window: the file has no window, or one as long as the context."""
    window = keys.value("attention.sliding_window", 0)
    if window and window < known["max_position_embeddings"]:
        keys.refuse("attention.sliding_window", "0 or the context length", window, "the model has no window")
    return {}


def window_of_all(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    """Return the window of all layers; 0 in the file means none."""
    has_one = keys.value("attention.sliding_window", 0) != 0
    return {"sliding_window": keys.count("attention.sliding_window") if has_one else None}


def _phi3(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    trained = known["rope_parameters"].get("original_max_position_embeddings", known["max_position_embeddings"])
    return {"original_max_position_embeddings": trained} | window_of_all(keys, known)


def _biases(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    biases = {"attention_bias": has(keys, "attn_q.bias"), "mlp_bias": has(keys, "ffn_up.bias")}
    return biases | no_window(keys, known)


def qwen3(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": has(keys, "attn_q.bias")} | no_window(keys, known)


def _stablelm(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    keys.value("use_parallel_residual", None)  # marked as read; the tensors decide
    parallel = not has(keys, "ffn_norm.weight")
    return {"use_qkv_bias": has(keys, "attn_q.bias"), "use_parallel_residual": parallel} | no_window(keys, known)


def _gemma2(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    base = known["rope_parameters"]["rope_theta"]
    keys.only("rope.freq_base_swa", base, reason="all layers rotate alike")
    return {
        "attn_logit_softcapping": keys.positive("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.positive("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _attention_scalar(known, largest=46),
        "sliding_window": keys.count("attention.sliding_window", 4096),
        "layer_types": layer_types(keys, known, every=2),
    }


def _gemma3(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    window = window_of_all(keys, known)["sliding_window"]
    layers, local = layer_types(keys, known, every=6), keys.positive("rope.freq_base_swa", 10000.0)
    return {
        "final_logit_softcapping": keys.positive_or_none("final_logit_softcapping"),
        "query_pre_attn_scalar": _attention_scalar(known, largest=62),
        "sliding_window": window or known["max_position_embeddings"],  # transformers needs a size even without a window
        "layer_types": layers if window else ["full_attention"] * len(layers),
        "rope_parameters": {
            "full_attention": known["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


def _attention_scalar(known: dict[str, Any], largest: int) -> int:
    """Return the number whose square root divides the scores.

    It is the number of columns of a head. In the model with ``largest`` layers it is embedding_length / head_count; no
    key of the file says so.
    """
    if known["num_hidden_layers"] == largest:
        return known["hidden_size"] // known["num_attention_heads"]
    return known["head_dim"]


def layer_types(keys: Metadata, known: dict[str, Any], every: int) -> list[str]:
    """Return the type of each layer. All but every ``every``-th have a window, unless the file lists the layers."""
    layers, key = known["num_hidden_layers"], "attention.sliding_window_pattern"
    given = keys.file.metadata.get(f"{keys.file.architecture}.{key}")
    if isinstance(given, list):
        keys.value(key)  # marked as read; a list with one value per layer
        return ["sliding_attention" if slides else "full_attention" for slides in given]
    every = keys.count(key, every)
    return ["full_attention" if layer % every == every - 1 else "sliding_attention" for layer in range(layers)]


ARCHITECTURES = {
    "llama": Architecture(
        model_type="llama",
        epsilon=(ROOT_MEAN_SQUARE, "rms_norm_eps"),
        rope_tensors=(FREQUENCIES, SHORT, LONG),
        more=_biases,
    ),
    "qwen2": Architecture(model_type="qwen2", epsilon=(ROOT_MEAN_SQUARE, "rms_norm_eps"), more=no_window),
    "qwen3": Architecture(model_type="qwen3", epsilon=(ROOT_MEAN_SQUARE, "rms_norm_eps"), more=qwen3),
    "phi3": Architecture(
        model_type="phi3",
        epsilon=(ROOT_MEAN_SQUARE, "rms_norm_eps"),
        partial_rotary=True,
        own_head_dim=False,
        rope_tensors=(SHORT, LONG),
        more=_phi3,
    ),
    "gemma2": Architecture(model_type="gemma2", epsilon=(ROOT_MEAN_SQUARE, "rms_norm_eps"), more=_gemma2),
    "gemma3": Architecture(model_type="gemma3_text", epsilon=(ROOT_MEAN_SQUARE, "rms_norm_eps"), more=_gemma3),
    "gpt2": Architecture(
        model_type="gpt2",
        epsilon=(_MEAN, "layer_norm_epsilon"),
        sizes=("n_positions", "n_embd", "n_layer", "n_inner", "n_head"),
        rotary=False,
        own_head_dim=False,
    ),
    "starcoder2": Architecture(model_type="starcoder2", epsilon=(_MEAN, "norm_epsilon"), more=window_of_all),
    "stablelm": Architecture(
        model_type="stablelm",
        epsilon=(_MEAN, "layer_norm_eps"),
        partial_rotary=True,
        own_head_dim=False,
        more=_stablelm,
    ),
    "nemotron": Architecture(model_type="nemotron", epsilon=(_MEAN, "norm_eps"), partial_rotary=True, more=_biases),
}
"""Architectures by ``general.architecture``."""
