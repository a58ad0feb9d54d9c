# SPDX-License-Identifier: Apache-2.0
"""Encoder layers of transformers that run in one call: BERT's and those like it, with norms behind attention and MLP,
and ModernBERT's, with norms before them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lowbit.models.encoder_batches import packed_batch
from lowbit.models.fused_attention import IDLE, AttentionPiece
from lowbit.models.fused_layer import OPTIONS, cache_of, calls_lowbit_attention, inputs_of, named
from lowbit.models.half_steps import HALF_STEPS
from lowbit.models.layer_joins import Joins, joins_of
from lowbit.models.layer_program import NORMS, LayerProgram
from lowbit.models.steps import MISSING, KeptPrograms
from lowbit.ops.tracing import is_traced
from lowbit.quant.fused import Fused, has_own_tensors, hooked, is_inference
from lowbit.quant.fused_mlp import activation_of
from lowbit.quant.quant_linear import QuantLinear
from lowbit.quant.unchanged import Attributes


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


@dataclass(slots=True)
class _Found:
    """The modules of a layer, by their paths: what it computes with, what does nothing, and what holds them."""

    pieces: dict[str, nn.Module] = field(default_factory=dict)
    activations: dict[str, int] = field(default_factory=dict)
    idle: list[str] = field(default_factory=list)
    containers: list[tuple[str, nn.Module]] = field(default_factory=list)
    unknown: dict[str, nn.Module] = field(default_factory=dict)


def may_be_encoder_layer(name: str, module: nn.Module) -> bool:
    """Whether the module may be an encoder layer: an entry of a list, with one fused attention that is not causal."""
    attentions = [part for part in module.modules() if isinstance(part, AttentionPiece)]
    return name.rpartition(".")[2].isdigit() and len(attentions) == 1 and not attentions[0].is_causal


def fuse_encoder_layer(module: nn.Module) -> str:
    """Fuse ``module``, a layer whose submodules are already fused, or return the reason why it stays unchanged.

    A probe call, in which each piece returns a random tensor, shows how the layer connects them.
    """
    found = _Found()
    _find(module, "", found)
    problem = _problem(found)
    if problem:
        return problem
    (attention,) = (path for path, piece in found.pieces.items() if isinstance(piece, AttentionPiece))
    of_attention = found.pieces[attention].facts
    widths = {path: piece.out_features for path, piece in found.pieces.items() if type(piece) is QuantLinear}
    widths |= dict.fromkeys(found.activations, 0)
    if of_attention["out"] is None:
        widths[attention] = of_attention["kv_heads"] * of_attention["head_dim"]
    joins = joins_of(module, tuple(found.pieces), (attention,), of_attention["hidden"], widths)
    if joins is None or not _are_of_linears(found, joins):
        return "it does not join its pieces as an encoder layer does"
    noted = [(path, Attributes(each, without=("training", "facts"))) for path, each in found.containers]
    FusedEncoderLayer.take(
        module,
        {
            "pieces": list(found.pieces.items()),
            "containers": noted,
            "activations": found.activations,
            "idle": found.idle,
            "attention": found.pieces[attention],
            "attention_name": attention,
            "joins": joins,
            "arguments": _arguments(module),
            "kinds": (0,),
            "windows": (window_of(found.pieces[attention]),),
            "kept": KeptPrograms(),
        },
    )
    return ""


def _arguments(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the positional arguments of a layer behind its input."""
    _, *others = inspect.signature(module.forward).parameters.values()
    return tuple(each.name for each in others if each.kind is each.POSITIONAL_OR_KEYWORD)


def window_of(attention: AttentionPiece) -> int | None:
    """Return how far a token sees on each side, or None if it sees all tokens."""
    window = attention.facts["options"].get("sliding_window")
    return None if window is None else int(window) - 1  # as FlashAttention counts: with the token itself


def _find(module: nn.Module, path: str, found: _Found) -> None:
    found.containers.append((path, module))
    for name, child in module._modules.items():
        at = f"{path}.{name}" if path else name
        if child is None:
            continue
        if isinstance(child, (*HALF_STEPS, *NORMS)) or type(child) is QuantLinear:
            found.pieces[at] = child
        elif type(child) in IDLE:
            found.idle.append(at)
        elif child._modules and not has_own_tensors(child):
            _find(child, at, found)
        elif (number := activation_of(child)) is not None:
            found.pieces[at], found.activations[at] = child, number
        else:
            found.unknown[at] = child


def _problem(found: _Found) -> str:
    for path, module in found.unknown.items():
        return f"its {path} is {type(module).__name__}, not packed or fused"
    if len([piece for piece in found.pieces.values() if isinstance(piece, AttentionPiece)]) != 1:
        return "it has more than one attention"
    for path, piece in found.pieces.items():
        if isinstance(piece, AttentionPiece) and (unknown := set(piece.facts["options"]) - OPTIONS):
            return f"its {path} has the option {', '.join(sorted(unknown))}"
    for path, module in found.containers:
        if not path and has_own_tensors(module):
            return "it has parameters of its own"
        if hook := hooked(module, module._modules):
            return f"hooks on {path}.{hook}" if path else f"hooks on {hook}"
    return ""


def _are_of_linears(found: _Found, joins: Joins) -> bool:
    """Whether the input of each activation is the result of one linear layer, which can compute it too."""
    linear = [type(found.pieces[piece.name]) is QuantLinear for piece in joins.pieces]
    return all(
        len(piece.terms) == 1 and piece.terms[0][0] == 1.0 and piece.terms[0][1] > 0 and linear[piece.terms[0][1] - 1]
        for piece in joins.pieces
        if piece.name in found.activations
    )
