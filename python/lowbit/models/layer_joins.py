# SPDX-License-Identifier: Apache-2.0
"""How a decoder layer joins its pieces: norms, attention and MLP.

The input of each piece, and the result of the layer, is a sum of earlier results with constant factors:

    x + attention(norm(x))                       Llama's first half
    x + 0.22 * attention(norm(x))                Granite's
    x + norm(attention(x))                       OLMo 2's
    x + attention(norm(x)) + mlp(norm(x))        GPT-NeoX, with two norms; Phi and Cohere, with one

A probe call finds the factors, in float64: each piece returns a random tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.ops.program import NONE, Program
from lowbit.quant.fused import probe_of, probe_with, submodule_at

Terms = tuple[tuple[float, int], ...]
"""A sum: factors and sources. Source 0 is the input of the layer, source i the result of the i-th piece called."""

_SHAPE = (2, 3)  # batch and tokens of the probe
_TOLERANCE = 1e-9  # relative to the largest value, in float64
_ZERO = 1e-7
"""A smaller factor is the rounding of 0. No model multiplies a whole half by so little."""


@dataclass(frozen=True, slots=True)
class Join:
    """A piece of a layer, in the order of their calls, and its input."""

    name: str
    terms: Terms


@dataclass(frozen=True, slots=True)
class Joins:
    """The pieces of a layer and its result."""

    pieces: tuple[Join, ...]
    result: Terms

    def are_read_once(self, join: Join) -> bool:
        """Whether a piece reads the result of another one, and nothing else reads it."""
        (_, source), *more = join.terms
        sums = [*(piece.terms for piece in self.pieces), self.result]
        return not more and source > 0 and sum(any(of == source for _, of in terms) for terms in sums) == 1


@torch.no_grad()
def joins_of(
    layer: nn.Module, names: tuple[str, ...], halves: tuple[str, ...], hidden: int, widths: dict[str, int] | None = None
) -> Joins | None:
    """Return how ``layer`` joins its pieces, or None if it does something else.

    Args:
        names: the paths of the pieces, as ``"attention.output.dense"``.
        halves: those of them that are attention, whose result is a pair.
        hidden: the number of columns of the residual stream.
        widths: the numbers of columns of the results of pieces that have others; 0 for those of their input.
    """
    generator = torch.Generator("cpu").manual_seed(0)

    def random(columns: int) -> Tensor:
        return torch.randn(*_SHAPE, columns, generator=generator, device="cpu", dtype=torch.float64)

    x, results = random(hidden), {}
    calls: list[tuple[str, Tensor]] = []

    def stand_in(name: str) -> nn.Module:
        def forward(*args: Tensor, **kwargs: Any) -> Any:
            given = args[0] if args else kwargs["hidden_states"]
            calls.append((name, given.clone()))
            results[name] = random((widths or {}).get(name, hidden) or given.shape[-1])
            return (results[name].clone(), None) if name in halves else results[name].clone()

        piece = probe_of(submodule_at(layer, name))
        piece.forward = forward
        return piece

    probe = probe_with(layer, {name: stand_in(name) for name in names})
    try:
        y = probe(x.clone(), attention_mask=None, position_embeddings=(x, x), past_key_values=None)
    except (TypeError, RuntimeError, ValueError, AttributeError, KeyError):  # another signature
        return None
    if not isinstance(y, Tensor) or sorted(name for name, _ in calls) != sorted(names):
        return None
    sources, pieces = [x], []
    for name, of_piece in calls:
        pieces.append(Join(name, _terms(of_piece, sources)))
        sources.append(results[name])
    result = _terms(y, sources)
    return Joins(tuple(pieces), result) if result and all(piece.terms for piece in pieces) else None


def _terms(y: Tensor, sources: list[Tensor]) -> Terms:
    """Return y as a sum of those sources that have its shape; an empty tuple if it is none."""
    alike = [i for i, source in enumerate(sources) if source.shape == y.shape]
    if not alike or y.dtype != torch.float64:
        return ()
    matrix = torch.stack([sources[i].flatten() for i in alike], dim=1)
    factors = torch.linalg.lstsq(matrix, y.flatten()[:, None]).solution.flatten()
    if (matrix @ factors - y.flatten()).abs().max() > _TOLERANCE * y.abs().max():
        return ()
    rounded = [float(f"{factor:.10g}") for factor in factors.tolist()]  # the factor that the model has
    return tuple((factor, i) for i, factor in zip(alike, rounded, strict=True) if abs(factor) > _ZERO)


class Sums:
    """The sums of one layer as operands of a program. The last term of a sum is written with the sum of the others as
    its ``add``, so that most sums cost no step.

    Args:
        program: the program.
        x: the operand of source 0.
    """

    def __init__(self, program: Program, x: int) -> None:
        self._program = program
        self._writers: list[Callable[[int], int]] = [lambda add: x]
        self._operands: dict[Terms, int] = {((1.0, 0),): x}

    def append(self, write: Callable[[int], int]) -> None:
        """Add a source. ``write(add)`` writes its last step, which adds the operand ``add`` or `NONE`."""
        self._writers.append(write)

    def of(self, terms: Terms) -> int:
        """Return the operand of this sum, written at most once."""
        if terms not in self._operands:
            self._operands[terms] = self._written(terms)
        return self._operands[terms]

    def _written(self, terms: Terms) -> int:
        *before, (factor, source) = terms
        alone: Terms = ((1.0, source),)
        if terms == alone:
            return self._writers[source](NONE)
        add = self.of(tuple(before)) if before else NONE
        if factor == 1.0 and alone not in self._operands:
            return self._writers[source](add)
        return self._program.scaled_add(self.of(alone), add, scale=factor)
