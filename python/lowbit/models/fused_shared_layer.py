# SPDX-License-Identifier: Apache-2.0
"""Layers with a block that others share (Zamba 2), as a part of the call of all layers:

    t = linear(mlp(norm(attention(norm([x, first])))));   y = x + mamba(norm(x + t))

``first`` is the input of the first layer, which lies beside x as more columns.
"""

from __future__ import annotations

from torch import nn

from lowbit.models.fused_layer import FusedDecoderLayer, limits_of, reads_of
from lowbit.models.layer_pieces import LayerPieces
from lowbit.models.recurrent_steps import RECURRENT_STEPS, why_no_steps
from lowbit.models.shared_block import FusedSharedAttention


def may_be_shared_layer(module: nn.Module) -> bool:
    """Whether the module may be such a layer: it gets the input of the first one, and has a recurrent layer and attention
    of a shared block in its submodules."""
    parts = [*module.modules()]
    return (
        any(isinstance(part, FusedSharedAttention) for part in parts)
        and any(isinstance(part, tuple(RECURRENT_STEPS)) for part in parts)
        and bool(reads_of(module).first)
    )


def fuse_shared_layer(module: nn.Module) -> str:
    """Fuse ``module``, a layer whose submodules are already fused, or return the reason why it stays unchanged.

    A probe call, in which each piece returns a random tensor, shows how the layer connects them.
    """
    found = LayerPieces(module)
    if problem := found.problem(attentions=1):
        return problem
    mixers = {path: piece for path, piece in found.pieces.items() if isinstance(piece, tuple(RECURRENT_STEPS))}
    if len(mixers) != 1:
        return f"it has {len(mixers)} recurrent layers"
    ((path, mixer),), (attention,) = mixers.items(), found.attentions()
    if reason := why_no_steps(mixer):
        return f"of its {path}: {reason}"
    reads = reads_of(module)
    joins = found.joins(hidden=mixer.facts["hidden"], padded=(path,), reads=reads, index=mixer.layer_idx)
    if joins is None:
        return "it does not join its pieces as a layer with a shared block does"
    facts = found.facts(joins, attention)
    of_mixer = {"mixers": [mixer], "hidden": mixer.facts["hidden"], "sides": True, "reads": reads}
    FusedDecoderLayer.take(module, facts | of_mixer | {"limited": [mixer] if limits_of(mixer) else []})
    return ""
