# SPDX-License-Identifier: Apache-2.0
"""Calls of attention modules of transformers whose attention function records its arguments."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from lowbit.quant.fused import probe_of
from lowbit.quant.lora_layers import plain_children

_TOLERANCE = 1e-4  # relative to the largest value: the same float32 products, rotated in another order
_RECORDING = "lowbit_recording"
"""The name of the attention function that records its arguments. Only the configuration of a probe names it."""
_NOT_OPTIONS = ("dropout", "past_key_values", "position_ids", "output_attentions")
"""What modules pass to the attention function without an effect on its result: they are in evaluation mode, and may hand
on arguments that they do not know."""


def recording_probe(module: nn.Module) -> nn.Module:
    """Return a copy of an attention module, without LoRA, whose attention function records its arguments."""
    probe = probe_of(module, **plain_children(module))
    probe.config = copy.deepcopy(module.config)
    probe.config._attn_implementation = _RECORDING
    return probe


@torch.no_grad()
def recorded(probe: nn.Module, call: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of the attention function in this call and the result of the call, or None if the call fails
    or does not reach the attention function."""
    probe.seen = seen = {}
    try:
        seen["out"] = probe(**call)[0]
    except (TypeError, RuntimeError, ValueError, AttributeError):  # The module has another signature.
        return None
    return seen if "query" in seen else None


def _record(
    probe: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Record the arguments and return the queries as the result, or the values if only these have its size."""
    known = {name: option for name, option in options.items() if name not in _NOT_OPTIONS}
    probe.seen["dropout"] = options.get("dropout", 0.0)
    if known.get("is_causal", ...) == getattr(probe, "is_causal", None):  # which attention functions read themselves
        del known["is_causal"]
    probe.seen.update(query=query, key=key, value=value, options=known)
    result = query if query.shape[-1] == value.shape[-1] else value
    return result.transpose(1, 2).contiguous(), None


def agree(wanted: dict[str, Any], got: dict[str, Any] | None) -> bool:
    """Whether two calls passed the same to the attention function, and had the same result."""
    return (
        got is not None
        and got["options"] == wanted["options"]
        and all(
            got[name].shape == wanted[name].shape
            and bool((got[name] - wanted[name]).abs().max() <= _TOLERANCE * wanted[name].abs().max())
            for name in ("query", "key", "value", "out")
        )
    )


def trains_alike(probe: nn.Module, call: dict[str, Any], seen: dict[str, Any]) -> bool:
    """Whether a `recording_probe` drops nothing in training."""
    probe.training = True
    with torch.random.fork_rng(devices=[]):
        again = recorded(probe, call)
    return agree(seen, again) and not again["dropout"]


AttentionInterface.register(_RECORDING, _record)
