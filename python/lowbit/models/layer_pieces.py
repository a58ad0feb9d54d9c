# SPDX-License-Identifier: Apache-2.0
"""The pieces of a layer whose modules are fused: attention, norms, linear layers and activations, at any depth."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lowbit.models.fused_attention import IDLE, AttentionPiece
from lowbit.models.fused_layer import OPTIONS
from lowbit.models.half_steps import HALF_STEPS
from lowbit.models.layer_joins import USUAL, Joins, joins_of
from lowbit.models.layer_program import NORMS
from lowbit.models.steps import KeptPrograms
from lowbit.quant.fused import arguments_of, has_own_tensors, hooked
from lowbit.quant.fused_mlp import activation_of
from lowbit.quant.quant_linear import QuantLinear
from lowbit.quant.unchanged import Attributes


@dataclass(slots=True)
class LayerPieces:
    """The modules of a layer, by their paths: what it computes with, what does nothing, and what holds them.

    Args:
        layer: the layer, whose submodules are already fused.
    """

    layer: nn.Module
    pieces: dict[str, nn.Module] = field(default_factory=dict)
    activations: dict[str, int] = field(default_factory=dict)
    idle: list[str] = field(default_factory=list)
    containers: list[tuple[str, nn.Module]] = field(default_factory=list)
    unknown: dict[str, nn.Module] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._find(self.layer, "")

    def _find(self, module: nn.Module, path: str) -> None:
        self.containers.append((path, module))
        for name, child in module._modules.items():
            at = f"{path}.{name}" if path else name
            if child is None:
                continue
            if isinstance(child, (*HALF_STEPS, *NORMS)) or type(child) is QuantLinear:
                self.pieces[at] = child
            elif type(child) in IDLE:
                self.idle.append(at)
            elif child._modules and not has_own_tensors(child):
                self._find(child, at)
            elif (number := activation_of(child)) is not None:
                self.pieces[at], self.activations[at] = child, number
            else:
                self.unknown[at] = child

    def attentions(self) -> dict[str, AttentionPiece]:
        """Return the attentions by their paths."""
        return {path: piece for path, piece in self.pieces.items() if isinstance(piece, AttentionPiece)}

    def problem(self, attentions: int) -> str:
        """Return the reason why the layer, which may have so many attentions, is no program, or an empty string."""
        for path, module in self.unknown.items():
            return f"its {path} is {type(module).__name__}, not packed or fused"
        if len(self.attentions()) != attentions:
            return f"it has {len(self.attentions())} attentions"
        for path, piece in self.attentions().items():
            if unknown := set(piece.facts["options"]) - OPTIONS:
                return f"its {path} has the option {', '.join(sorted(unknown))}"
        for path, module in self.containers:
            if not path and has_own_tensors(module):
                return "it has parameters of its own"
            if hook := hooked(module, module._modules):
                return f"hooks on {path}.{hook}" if path else f"hooks on {hook}"
        return ""

    def joins(self, hidden: int = 0, **more: Any) -> Joins | None:
        """Return how the layer joins its pieces, or None if it does something else.

        ``hidden`` is the number of columns of the stream, by default what attention reads; ``more`` are further arguments
        of `joins_of`."""
        attentions = self.attentions()
        widths = {path: piece.out_features for path, piece in self.pieces.items() if type(piece) is QuantLinear}
        norms = [path for path, piece in self.pieces.items() if isinstance(piece, NORMS)]
        widths |= dict.fromkeys((*self.activations, *norms), 0)
        for path, piece in attentions.items():
            if piece.facts["out"] is None:
                widths[path] = piece.facts["kv_heads"] * piece.facts["head_dim"]
        hidden = hidden or next(iter(attentions.values())).facts["hidden"]
        joins = joins_of(self.layer, tuple(self.pieces), tuple(attentions), hidden, widths, **more)
        served = joins is not None and joins.behind is None and self._are_of_linears(joins)
        return joins if served else None

    def _are_of_linears(self, joins: Joins) -> bool:
        """Whether the input of each activation is the result of one linear layer, which can compute it too."""
        linear = [type(self.pieces[piece.name]) is QuantLinear for piece in joins.pieces]
        terms = [piece.terms for piece in joins.pieces if piece.name in self.activations]
        return all(len(of) == 1 and of[0][0] == 1.0 and of[0][1] > 0 and linear[of[0][1] - 1] for of in terms)

    def facts(self, joins: Joins, attention: str) -> dict[str, Any]:
        """Return the facts of the fused layer, whose self-attention has the path ``attention``."""
        return {
            "pieces": list(self.pieces.items()),
            "containers": [(path, Attributes(each, without=("training", "facts"))) for path, each in self.containers],
            "activations": self.activations,
            "idle": self.idle,
            "attention": self.pieces[attention],
            "attention_name": attention,
            "hidden": self.pieces[attention].facts["hidden"],
            "joins": joins,
            "arguments": arguments_of(self.layer),
            "reads": USUAL,
            "kinds": (0,),
            "kept": KeptPrograms(),
        }
