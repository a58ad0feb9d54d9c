# SPDX-License-Identifier: Apache-2.0
"""The keys of attention as attributes of a transformers configuration: numbers and sizes of heads, and the rotary
embedding as ``rope_parameters``.

In a hybrid some layers have no attention; the file gives these 0 heads of keys.

At position p, columns i and i + d / 2 of a head are rotated by the angle p / (divisor_i * base^(2 i / d)). A file gives
the divisors as one factor (linear), as a ramp between 1 and a factor (yarn), or as tensors: ``rope_freqs.weight`` for
Llama 3, ``rope_factors_short.weight`` and ``rope_factors_long.weight`` for longrope, the latter beyond the context
length of training. transformers takes arbitrary divisors as longrope.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lowbit.checkpoints.gguf.architectures import FREQUENCIES, LONG, SHORT, Architecture
from lowbit.checkpoints.gguf.metadata import Metadata

_BASE = 10000.0  # the default of llama.cpp
_GROUPS = "attention.head_count_kv"


def heads_of_all_layers(keys: Metadata, architecture: Architecture) -> dict[str, Any]:
    """Return the attributes of attention that all layers have."""
    return _heads(keys, architecture, keys.count(_GROUPS, keys.count("attention.head_count")))


def heads_of_some_layers(keys: Metadata, architecture: Architecture) -> dict[str, Any]:
    """Return the attributes of attention that the layers with heads of keys have."""
    return _heads(keys, architecture, _groups_of_some(keys))


def heads_that_do_not_rotate(keys: Metadata, architecture: Architecture) -> dict[str, Any]:
    """Return the attributes of attention without a rotary embedding, of the layers with heads of keys. The keys of a
    rotary embedding, which llama.cpp's converter writes all the same, have no effect."""
    prefix = f"{keys.file.architecture}.rope."
    keys.read |= {key for key in keys.file.metadata if key.startswith(prefix)}
    groups = _groups_of_some(keys)
    return {"num_key_value_heads": groups, "head_dim": _head_dim(keys, groups)}


def attends(keys: Metadata) -> list[bool]:
    """Return whether each layer has attention."""
    return [groups > 0 for groups in keys.by_layer(_GROUPS)]


def _heads(keys: Metadata, architecture: Architecture, groups: int) -> dict[str, Any]:
    heads, width = keys.count("attention.head_count"), keys.count("embedding_length")
    head_dim = _head_dim(keys, groups)
    if not architecture.own_head_dim and head_dim != width // heads:
        keys.refuse("attention.key_length", f"{width // heads}, embedding_length / head_count", head_dim)
    if not architecture.rotary:
        keys.only(_GROUPS, heads, reason="each head has keys of its own")
        return {}
    attributes = {"num_key_value_heads": groups, "rope_parameters": rope_parameters(keys, architecture, head_dim)}
    return attributes | ({"head_dim": head_dim} if architecture.own_head_dim else {})


def _head_dim(keys: Metadata, groups: int) -> int:
    """Return the number of columns of a head, of queries, keys and values alike."""
    heads, width = keys.count("attention.head_count"), keys.count("embedding_length")
    if heads % groups:
        keys.refuse(_GROUPS, f"a divisor of the {heads} heads", groups)
    head_dim = keys.count("attention.key_length", width / heads)
    if head_dim != int(head_dim):
        keys.refuse("attention.head_count", f"a divisor of the embedding_length {width} where no key_length is", heads)
    keys.only("attention.value_length", int(head_dim), reason="as many as attention.key_length")
    return int(head_dim)


def _groups_of_some(keys: Metadata) -> int:
    """Return the number of heads of keys of the layers that have any; it must be the same."""
    numbers = keys.by_layer(_GROUPS)
    if len(given := set(numbers) - {0}) != 1:
        keys.refuse(_GROUPS, "for each layer 0 or a number that is the same for all others", numbers)
    return given.pop()


def rope_parameters(keys: Metadata, architecture: Architecture, head_dim: int) -> dict[str, Any]:
    """Return ``rope_parameters`` of the layers with full attention.

    Raises:
        ValueError: the file has a rotary embedding that transformers' model of this architecture does not support.
    """
    rotated = keys.count("rope.dimension_count", head_dim)
    if rotated > head_dim or rotated % 2 or (rotated != head_dim and not architecture.partial_rotary):
        keys.refuse("rope.dimension_count", f"{head_dim}, the columns of a head", rotated)
    base = keys.positive("rope.freq_base", _BASE)
    if architecture.partial_rotary:
        scaled = _scaled(keys, architecture, rotated)
        return {"rope_theta": base, "partial_rotary_factor": _fraction(rotated, head_dim)} | scaled
    return {"rope_theta": base} | _scaled(keys, architecture, rotated)


def _scaled(keys: Metadata, architecture: Architecture, rotated: int) -> dict[str, Any]:
    kind = keys.value("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn", "longrope"):
        keys.refuse("rope.scaling.type", "none, linear, yarn or longrope", kind)
    factor = _factor(keys)
    attention = keys.positive("rope.scaling.attn_factor", 1.0)
    context = keys.count("context_length")
    trained = keys.count("rope.scaling.original_context_length", context)
    yarn = _yarn(keys, architecture, kind, factor, attention)
    keys.only("rope.scaling.alpha", 0.0, 1.0, reason="it is of another scaling")
    tensors = (name for name in architecture.rope_tensors if name in keys.file.tensors)
    divisors = {name: _divisors(keys, name, rotated) for name in tensors}
    if SHORT in divisors or LONG in divisors or kind == "longrope":
        if divisors.keys() != {SHORT, LONG} or factor != 1:
            keys.refuse("rope.scaling.type", f"of a file with {SHORT} and {LONG}, and no factor", kind)
        return _longrope(divisors[SHORT], divisors[LONG], trained, context, attention)
    if kind == "yarn" and factor != 1:
        if FREQUENCIES in divisors or architecture.model_type == "phi3":
            keys.refuse("rope.scaling.type", "none, linear or longrope", kind, "transformers has no such embedding")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained} | yarn
    if attention != 1:
        keys.refuse("rope.scaling.attn_factor", "1.0", attention, f"the scaling is {kind}")
    if factor == 1 and (of_llama3 := _llama3(divisors.get(FREQUENCIES, [1.0]), keys.positive("rope.freq_base", _BASE))):
        return of_llama3
    if FREQUENCIES in divisors or (factor != 1 and architecture.model_type == "phi3"):
        both = [divisor * factor for divisor in divisors.get(FREQUENCIES, [1.0] * (rotated // 2))]
        return _longrope(both, both, context, context, 1.0)
    return {"rope_type": "linear", "factor": factor} if factor != 1 else {"rope_type": "default"}


def _factor(keys: Metadata) -> float:
    """Return the divisor of all frequencies. 0 means 1, and ``rope.scale_linear`` is an older name."""
    factors = [keys.value(f"rope.{key}", 0.0) or 1.0 for key in ("scaling.factor", "scale_linear")]
    factor = factors[0] if factors[0] != 1 else factors[1]
    if type(factor) not in (int, float) or not 0 < factor < math.inf:
        keys.refuse("rope.scaling.factor", "a number above 0", factor)
    return 1.0 if keys.value("rope.scaling.type", "linear") == "none" else float(factor)


def _yarn(keys: Metadata, architecture: Architecture, kind: str, factor: float, attention: float) -> dict[str, Any]:
    """Return YaRN's magnitude, by default 1 + 0.1 ln(factor), and the limits of its ramp.

    Where it multiplies the scores instead, by the square of 1 + 0.1 m ln(factor), the file has a tenth of m.
    """
    keys.only("rope.scaling.yarn_ext_factor", 1.0, -1.0, reason="transformers has no such mixture")
    magnitude, of_scores = max(1.0, 1 + 0.1 * math.log(factor)), {}
    if not architecture.scales_scores:
        keys.only("rope.scaling.yarn_log_multiplier", 0.0, reason="transformers' models of this architecture have none")
    elif multiplier := keys.positive_or_none("rope.scaling.yarn_log_multiplier"):
        if kind != "yarn" and factor != 1:
            keys.refuse("rope.scaling.type", "yarn where yarn_log_multiplier is not 0", kind)
        magnitude, of_scores = 1.0, {"mscale_all_dim": multiplier / 0.1}
    magnitude = keys.positive("rope.scaling.yarn_attn_factor", magnitude)
    return of_scores | {
        "attention_factor": float(magnitude * attention),
        "beta_fast": keys.positive("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.positive("rope.scaling.yarn_beta_slow", 1.0),
    }


def _llama3(divisors: list[float], base: float) -> dict[str, Any] | None:
    """Return parameters of type "llama3" if the divisors are those of Llama 3.1 to 3.3, else None. transformers
    computes this type once, not in every call.

    Wavelengths longer than the training context are divided by the factor, those shorter than a quarter of it are
    unchanged, and between them 1 / divisor is linear in the number of wavelengths in the context.
    """
    factor, context = max(divisors), 8192
    waves = context / (2 * np.pi * base ** (np.arange(len(divisors)) / len(divisors)))
    ramp = np.clip((waves - 1) / 3, 0, 1)
    if factor == 1 or not np.allclose(1 / ((1 - ramp) / factor + ramp), divisors, rtol=1e-5, atol=0):
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": context,
    }


def _longrope(short: list[float], long: list[float], trained: int, context: int, attention: float) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "factor": max(1.0, context / trained),
        "original_max_position_embeddings": trained,
        "attention_factor": float(attention),
    }


def _divisors(keys: Metadata, name: str, rotated: int) -> list[float]:
    tensor = keys.file.tensors[name]
    if tensor.type != "F32" or tensor.shape != (rotated // 2,):
        raise ValueError(
            f"{keys.file.paths[0]}: tensor {name} must be F32 of shape [{rotated // 2}], got {tensor.type} of "
            f"{list(tensor.shape)}"
        )
    values = np.frombuffer(tensor.data, np.float32)
    if not (np.isfinite(values) & (values > 0)).all():
        raise ValueError(f"{keys.file.paths[0]}: tensor {name} must hold numbers above 0")
    return values.tolist()


def _fraction(rotated: int, head_dim: int) -> float:
    """Return the fraction for which ``int(head_dim * fraction)`` in transformers is ``rotated``."""
    fraction = rotated / head_dim
    return fraction if int(head_dim * fraction) == rotated else math.nextafter(fraction, 1)
