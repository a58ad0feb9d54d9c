# SPDX-License-Identifier: Apache-2.0
"""The metadata keys of experts and their router as attributes of a transformers configuration.

The router scores all experts of a layer, by softmax or sigmoid, and chooses some. Their weights are the scores, divided
by their sum if `ExpertKeys.norm` says so, times a constant. A key that transformers' model of the architecture cannot
follow is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lowbit.checkpoints.gguf.counts import is_in_layer
from lowbit.checkpoints.gguf.metadata import Metadata

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3
"""Values of ``expert_gating_func``; 0 means that the architecture decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertKeys:
    """How an architecture takes the keys of experts. Fields without a default text are names of attributes; an empty
    name means that the model has no such attribute."""

    count: str
    inner: str
    """The attribute for the rows of an expert's gate, ``expert_feed_forward_length``."""
    scores: int = SOFTMAX
    """The only value of ``expert_gating_func``."""
    norm: str = ""
    norm_by_default: bool | None = None
    """Whether the weights of the chosen experts add up to 1 if the file does not say. Without an attribute ``norm`` it
    is the only value; None if the result does not depend on it."""
    scale: str = ""
    shared_inner: str = ""
    """The attribute for the rows of the shared expert's gate, ``expert_shared_feed_forward_length``."""
    shared_count: str = ""
    groups: str = ""
    used_groups: str = ""
    dense_layers: str = ""
    """The attribute for the number of layers at the beginning that have no experts."""


def expert_attributes(keys: Metadata, known: dict[str, Any], rules: ExpertKeys) -> dict[str, Any]:
    """Return the attributes of the experts and their router.

    Args:
        keys: the metadata.
        known: the attributes that are known so far.
        rules: how the architecture takes them.

    Raises:
        ValueError: a key is missing, or transformers' model cannot follow it. The message names the file and the key.
    """
    count, used = keys.count("expert_count"), keys.count("expert_used_count")
    if used > count:
        keys.refuse("expert_used_count", f"1 to {count}, the number of experts", used)
    dense_rows = known.get("intermediate_size", 1)
    rows = _rows_of(keys, "ffn_down_exps.weight", dense_rows)
    attributes = {
        rules.count: count,
        "num_experts_per_tok": used,
        rules.inner: keys.count("expert_feed_forward_length", rows),
    }
    keys.only("expert_gating_func", rules.scores, 0, reason="the router of this model scores in one way")
    attributes |= _weights(keys, rules) | _groups(keys, rules)
    if rules.shared_inner:
        rows = _rows_of(keys, "ffn_down_shexp.weight", dense_rows)
        attributes[rules.shared_inner] = keys.count("expert_shared_feed_forward_length", rows)
    else:
        keys.only("expert_shared_feed_forward_length", 0, reason="the model has no shared experts of their own size")
    if rules.shared_count:
        attributes[rules.shared_count] = keys.count("expert_shared_count")
    else:
        keys.only("expert_shared_count", 0, *([1] if rules.shared_inner else []), reason="the model has no such number")
    if not rules.dense_layers:
        keys.only("leading_dense_block_count", 0, reason="every layer of this model has experts")
        return attributes
    dense, layers = keys.value("leading_dense_block_count", 0), known["num_hidden_layers"]
    if type(dense) is not int or not 0 <= dense <= layers:
        keys.refuse("leading_dense_block_count", f"0 to {layers}, the number of layers", dense)
    return attributes | {rules.dense_layers: dense}


def _weights(keys: Metadata, rules: ExpertKeys) -> dict[str, Any]:
    """Return what is done with the scores of the chosen experts."""
    attributes: dict[str, Any] = {}
    if rules.norm:
        attributes[rules.norm] = keys.flag("expert_weights_norm", rules.norm_by_default)
    elif rules.norm_by_default is None:
        keys.flag("expert_weights_norm", True)
    else:
        keys.only("expert_weights_norm", rules.norm_by_default, reason="the model leaves no choice")
    scale = keys.value("expert_weights_scale", 0.0) or 1.0  # 0 means none
    if rules.scale:
        attributes[rules.scale] = scale if scale == 1 else keys.positive("expert_weights_scale")
    else:
        keys.only("expert_weights_scale", 0.0, 1.0, reason="the model has no such factor")
    return attributes


def _groups(keys: Metadata, rules: ExpertKeys) -> dict[str, Any]:
    """Return the number of groups of experts, and of those from which a token's experts are chosen."""
    if not rules.groups:
        for key in ("expert_group_count", "expert_group_used_count"):
            keys.only(key, 0, 1, reason="the model has no groups of experts")
        return {}
    count = keys.value("expert_group_count", 1) or 1
    used = keys.value("expert_group_used_count", 1) or 1
    if type(count) is not int or count < 1 or keys.count("expert_count") % count:
        keys.refuse("expert_group_count", "a divisor of the number of experts", count)
    if type(used) is not int or not 1 <= used <= count:
        keys.refuse("expert_group_used_count", f"1 to {count}, the number of groups", used)
    return {rules.groups: count, rules.used_groups: used}


def _rows_of(keys: Metadata, name: str, default: int) -> int:
    """Return the inner size by the tensor of this name in the first layer that has one."""
    found = (tensor.shape for tensor in keys.file.tensors.values() if is_in_layer(tensor.name, name))
    return next(found, (default,))[-1]
