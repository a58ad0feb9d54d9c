# SPDX-License-Identifier: Apache-2.0
"""Encoder layers of transformers that run in one call: BERT's and those like it, with norms behind attention and MLP,
and those of ModernBERT, Whisper, CLIP and ViT, with norms before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lowbit.models.encoder_batches import packed_batch
from lowbit.models.fused_attention import AttentionPiece
from lowbit.models.fused_layer import cache_of, calls_lowbit_attention, inputs_of
from lowbit.models.layer_pieces import LayerPieces
from lowbit.models.layer_program import LayerProgram
from lowbit.models.steps import MISSING
from lowbit.ops.tracing import is_traced
from lowbit.quant.fused import Fused, is_inference, named


class FusedEncoderLayer(Fused):
    """An encoder layer that runs as one call of the op `run_program`, or as a part of one. `lowbit.fuse` makes it in
    place."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_traced():
            return super().forward(hidden_states, *args, **kwargs)
        y = encoded((self,), self.facts, hidden_states, (kwargs | named(self, args),))
        return super().forward(hidden_states, *args, **kwargs) if y is None else y


def encoded(
    layers: Sequence[FusedEncoderLayer], facts: dict[str, Any], x: Tensor, calls: Sequence[dict[str, Any]]
) -> Tensor | None:
    """Return the output of the last layer ``[B, L, H]``, with zeros in place of padding, or None if the layers must be
    called one by one.

    Args:
        layers: the layers in the order of their calls.
        facts: what is known of the module that has these layers. ``kinds`` has one number per layer: layers of one kind
            get the same mask and rotary embedding, and have one of the ``windows``. ``kept`` are their programs.
        x: the input of the first layer.
        calls: the other arguments of each layer.
    """
    if not is_inference(x) or not calls_lowbit_attention(facts["attention"]) or cache_of(calls[0]) is not None:
        return None
    kinds, dtype = facts["kinds"], x.dtype
    program = facts["kept"].serving(
        lambda kept: kept.serves(dtype), lambda: LayerProgram(layers, kinds, dtype, causal=False)
    )
    if program.run is None or not program.merged:
        return None
    inputs = inputs_of(x, kinds, calls, program.rotates, program.half_rotary)
    if inputs is None:
        return None
    packed = packed_batch(inputs, facts["windows"])
    inputs = [*inputs, MISSING] if packed is None else packed.inputs
    states = program.memory(inputs[0])
    y = program.run(states, inputs, [0] * len(facts["windows"]) if states else [])
    return y if packed is None else packed.padded(y)


def may_be_encoder_layer(name: str, module: nn.Module) -> bool:
    """Whether the module may be an encoder layer: an entry of a list, with one fused attention that is not causal."""
    attentions = [part for part in module.modules() if isinstance(part, AttentionPiece)]
    return name.rpartition(".")[2].isdigit() and len(attentions) == 1 and not attentions[0].is_causal


def fuse_encoder_layer(module: nn.Module) -> str:
    """Fuse ``module``, a layer whose submodules are already fused, or return the reason why it stays unchanged.

    A probe call, in which each piece returns a random tensor, shows how the layer connects them.
    """
    found = LayerPieces(module)
    problem = found.problem(attentions=1)
    if problem:
        return problem
    joins = found.joins()
    if joins is None:
        return "it does not join its pieces as an encoder layer does"
    ((path, attention),) = found.attentions().items()
    FusedEncoderLayer.take(module, found.facts(joins, path) | {"windows": (window_of(attention),)})
    return ""


def window_of(attention: AttentionPiece) -> int | None:
    """Return how far a token sees on each side, or None if it sees all tokens."""
    window = attention.facts["options"].get("sliding_window")
    return None if window is None else int(window) - 1  # as FlashAttention counts: with the token itself
