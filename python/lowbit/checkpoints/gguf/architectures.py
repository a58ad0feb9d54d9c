# SPDX-License-Identifier: Apache-2.0
"""The meaning of each architecture's keys for its model in transformers. Names, defaults and rules are llama.cpp's
(src/llama-model.cpp, src/models/), except where it omits a part of the model: docs/gguf.md says where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lowbit.checkpoints.gguf.metadata import Metadata

FREQUENCIES, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
SIZES = ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count")
"""Keys that every file has."""
_SIZES = ("max_position_embeddings", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
_ROOT_MEAN_SQUARE, _MEAN = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One architecture of GGUF files."""

    model_type: str
    """As transformers' ``AutoConfig`` names it."""
    epsilon: tuple[str, str]
    """The key of the norms' epsilon, and its attribute."""
    sizes: tuple[str, ...] = _SIZES
    """The attributes of `SIZES`."""
    rotary: bool = True
    partial_rotary: bool = False
    """Whether a part of a head's columns may be rotated."""
    own_head_dim: bool = True
    """Whether a head may have other than embedding_length / head_count columns."""
    rope_tensors: tuple[str, ...] = ()
    """Tensors that are read into the configuration."""
    more: Callable[[Metadata, dict[str, Any]], dict[str, Any]] | None = None
    """The other attributes, of those that are known before."""


def _has(keys: Metadata, name: str) -> bool:
    return any(tensor.startswith("blk.") and tensor.endswith(f".{name}") for tensor in keys.file.tensors)


def _no_window(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    """Of a model whose attention has no window: the file may say so, or have one that is never left."""
    window = keys.value("attention.sliding_window", 0)
    if window and window < known["max_position_embeddings"]:
        keys.refuse("attention.sliding_window", "0 or the context length", window, "the model has no window")
    return {}


def _window(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    """Of all layers; 0 is none."""
    has_one = keys.value("attention.sliding_window", 0) != 0
    return {"sliding_window": keys.count("attention.sliding_window") if has_one else None}


def _phi3(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    trained = known["rope_parameters"].get("original_max_position_embeddings", known["max_position_embeddings"])
    return {"original_max_position_embeddings": trained} | _window(keys, known)


def _biases(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    biases = {"attention_bias": _has(keys, "attn_q.bias"), "mlp_bias": _has(keys, "ffn_up.bias")}
    return biases | _no_window(keys, known)


def _qwen3(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": _has(keys, "attn_q.bias")} | _no_window(keys, known)


def _stablelm(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    keys.value("use_parallel_residual", None)  # the tensors say it
    parallel = not _has(keys, "ffn_norm.weight")
    return {"use_qkv_bias": _has(keys, "attn_q.bias"), "use_parallel_residual": parallel} | _no_window(keys, known)


def _gemma2(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    base = known["rope_parameters"]["rope_theta"]
    keys.only("rope.freq_base_swa", base, reason="all layers rotate alike")
    return {
        "attn_logit_softcapping": keys.positive("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.positive("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _attention_scalar(known, largest=46),
        "sliding_window": keys.count("attention.sliding_window", 4096),
        "layer_types": _layer_types(keys, known, every=2),
    }


def _gemma3(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    window, has_cap = _window(keys, known)["sliding_window"], keys.value("final_logit_softcapping", 0.0) != 0
    layers, local = _layer_types(keys, known, every=6), keys.positive("rope.freq_base_swa", 10000.0)
    return {
        "final_logit_softcapping": keys.positive("final_logit_softcapping") if has_cap else None,
        "query_pre_attn_scalar": _attention_scalar(known, largest=62),
        "sliding_window": window or known["max_position_embeddings"],  # transformers makes its mask in any case
        "layer_types": layers if window else ["full_attention"] * len(layers),
        "rope_parameters": {
            "full_attention": known["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


def _attention_scalar(known: dict[str, Any], largest: int) -> int:
    """Scores are divided by its root: the columns of a head, and in the model of ``largest`` layers embedding_length /
    head_count, which no key says."""
    if known["num_hidden_layers"] == largest:
        return known["hidden_size"] // known["num_attention_heads"]
    return known["head_dim"]


def _layer_types(keys: Metadata, known: dict[str, Any], every: int) -> list[str]:
    """Whether each layer has a window: all but one of ``every``, or as the file says for each."""
    layers, key = known["num_hidden_layers"], "attention.sliding_window_pattern"
    given = keys.file.metadata.get(f"{keys.file.architecture}.{key}")
    if isinstance(given, list):
        keys.value(key)  # one for each layer
        return ["sliding_attention" if slides else "full_attention" for slides in given]
    every = keys.count(key, every)
    return ["full_attention" if layer % every == every - 1 else "sliding_attention" for layer in range(layers)]


ARCHITECTURES = {
    "llama": Architecture(
        model_type="llama",
        epsilon=(_ROOT_MEAN_SQUARE, "rms_norm_eps"),
        rope_tensors=(FREQUENCIES, SHORT, LONG),
        more=_biases,
    ),
    "qwen2": Architecture(model_type="qwen2", epsilon=(_ROOT_MEAN_SQUARE, "rms_norm_eps"), more=_no_window),
    "qwen3": Architecture(model_type="qwen3", epsilon=(_ROOT_MEAN_SQUARE, "rms_norm_eps"), more=_qwen3),
    "phi3": Architecture(
        model_type="phi3",
        epsilon=(_ROOT_MEAN_SQUARE, "rms_norm_eps"),
        partial_rotary=True,
        own_head_dim=False,
        rope_tensors=(SHORT, LONG),
        more=_phi3,
    ),
    "gemma2": Architecture(model_type="gemma2", epsilon=(_ROOT_MEAN_SQUARE, "rms_norm_eps"), more=_gemma2),
    "gemma3": Architecture(model_type="gemma3_text", epsilon=(_ROOT_MEAN_SQUARE, "rms_norm_eps"), more=_gemma3),
    "gpt2": Architecture(
        model_type="gpt2",
        epsilon=(_MEAN, "layer_norm_epsilon"),
        sizes=("n_positions", "n_embd", "n_layer", "n_inner", "n_head"),
        rotary=False,
        own_head_dim=False,
    ),
    "starcoder2": Architecture(model_type="starcoder2", epsilon=(_MEAN, "norm_epsilon"), more=_window),
    "stablelm": Architecture(
        model_type="stablelm",
        epsilon=(_MEAN, "layer_norm_eps"),
        partial_rotary=True,
        own_head_dim=False,
        more=_stablelm,
    ),
    "nemotron": Architecture(
        model_type="nemotron", epsilon=(_MEAN, "norm_eps"), partial_rotary=True, more=_biases
    ),
}
"""By ``general.architecture``."""
