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
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.ops.program import NONE, Program
from lowbit.quant.fused import probe_of, probe_with, submodule_at

Terms = tuple[tuple[float, int], ...]
"""A sum: factors and sources. Source 0 is the input of the layer, source i the result of the i-th piece called."""

MASKS = ("attention_mask", "mamba_attention_mask")
"""The arguments of a layer with attention and a recurrent layer side by side that are their masks."""
OF_ENCODER = ("encoder_hidden_states", "encoder_attention_mask")
"""The arguments of a layer that are the result of an encoder and its mask."""
WIDE = "residual_in_fp32"
"""The attribute of a layer that sums its result in float32."""
_SHAPE = (2, 3)  # batch and tokens of the probe
_LARGE = 65024.0
"""A number of float16 that layers which clamp their results make smaller."""
_TOLERANCE = 1e-9  # relative to the largest value, in float64
_ZERO = 1e-7
"""A smaller factor is the rounding of 0. No model multiplies a whole half by so little."""


@dataclass(frozen=True, slots=True)
class Reads:
    """The names that a layer has for its arguments."""

    masks: tuple[str, str] = MASKS
    """The masks of attention and of a recurrent layer."""
    first: str = ""
    """The input of the first layer."""
    index: str = ""
    """The index of the layer."""

    def named(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call with the usual names, without those that all calls of a program have."""
        rest = {name: value for name, value in call.items() if name not in (*self.masks, self.first, self.index)}
        return rest | {usual: call.get(name) for usual, name in zip(MASKS, self.masks, strict=True)}


USUAL = Reads()
OF_ALL_LAYERS = Reads(("causal_mask", MASKS[0]), "original_hidden_states", "layer_idx")
"""The names of Zamba 2, whose shared blocks read the input of the first layer beside that of their own."""


@dataclass(frozen=True, slots=True)
class Join:
    """A piece of a layer, in the order of their calls, and its input."""

    name: str
    terms: Terms
    crosses: bool = False
    """Whether the piece is attention to the result of an encoder."""
    beside: bool = False
    """Whether the input of the first layer lies beside the sum, as columns behind it."""


@dataclass(frozen=True, slots=True)
class Joins:
    """The pieces of a layer and its result."""

    pieces: tuple[Join, ...]
    result: Terms
    clamps: bool
    """Whether the layer clamps its result in float16 (BART, Whisper), as a program does not."""
    behind: tuple[None, ...] | None = None
    """What the layer returns behind its result; None if it returns the result alone."""
    wide: bool = False
    """Whether the sums of the result are in float32 whatever the dtype of the pieces (Mamba)."""

    def is_in_result(self, join: Join) -> bool:
        """Whether the result of a piece is a term of the layer's result."""
        return 1 + self.pieces.index(join) in {source for _, source in self.result}

    def reads_pieces(self, join: Join) -> bool:
        """Whether a piece reads the results of others that are in no sum of the layer's result."""
        return all(source > 0 and not self.is_in_result(self.pieces[source - 1]) for _, source in join.terms)

    def are_read_once(self, join: Join) -> bool:
        """Whether a piece reads the result of another one, and nothing else reads it."""
        (_, source), *more = join.terms
        sums = [*(piece.terms for piece in self.pieces), self.result]
        return not more and source > 0 and sum(any(of == source for _, of in terms) for terms in sums) == 1


@torch.no_grad()
def joins_of(
    layer: nn.Module,
    names: tuple[str, ...],
    halves: tuple[str, ...],
    hidden: int,
    widths: dict[str, int] | None = None,
    crosses: bool = False,
    padded: tuple[str, ...] = (),
    reads: Reads = USUAL,
    index: int = 0,
) -> Joins | None:
    """Return how ``layer`` joins its pieces, or None if it does something else.

    Args:
        names: the paths of the pieces, as ``"attention.output.dense"``.
        halves: those of them that are attention, whose result is a pair.
        hidden: the number of columns of the residual stream.
        widths: the numbers of columns of the results of pieces that have others; 0 for those of their input.
        crosses: whether the layer also gets the result of an encoder and a mask of it.
        padded: the pieces that get the second of two masks (`MASKS`).
        reads: the names of the arguments.
        index: the index of the layer.
    """
    generator = torch.Generator("cpu").manual_seed(0)

    def random(columns: int) -> Tensor:
        return torch.randn(*_SHAPE, columns, generator=generator, device="cpu", dtype=torch.float64)

    def large(columns: int) -> Tensor:
        return torch.full((*_SHAPE, columns), _LARGE, device="cpu", dtype=torch.float16)

    options = (widths or {}, crosses, padded)
    found = _called(layer, names, halves, hidden, *options, random, reads=reads, index=index)
    if found is None:
        return None
    x, calls, y, behind = found
    sources, pieces = [x], []
    for called in calls:
        pieces.append(Join(called.name, _terms(called.given, sources), called.crosses, called.beside))
        sources.append(called.result)
    result = _terms(y, sources)
    if not result or not all(piece.terms for piece in pieces):
        return None
    wide = bool(getattr(layer, WIDE, False))
    if wide and not _is_wide(layer, names, halves, hidden, result):
        return None
    in_half = _called(layer, names, halves, hidden, *options, large, reads=reads, index=index)
    wanted = torch.tensor(sum(factor * _LARGE for factor, _ in result)).half()
    clamps = in_half is None or not torch.allclose(in_half[2], wanted, rtol=1e-3)
    return Joins(tuple(pieces), result, clamps, behind, wide)


def _is_wide(layer: nn.Module, names: tuple[str, ...], halves: tuple[str, ...], hidden: int, result: Terms) -> bool:
    """Whether a layer of bfloat16 sums its result in float32, and rounds it to bfloat16 for what reads it."""
    generator = torch.Generator("cpu").manual_seed(0)

    def random(columns: int) -> Tensor:
        return torch.randn(*_SHAPE, columns, generator=generator, device="cpu").bfloat16()

    found = _called(layer, names, halves, hidden, {}, False, (), random, wide=True)
    if found is None:
        return False
    x, calls, y, _ = found
    sources = [x.float(), *(call.result.float() for call in calls)]
    return (
        y.dtype is torch.float32 and all(call.given.dtype is torch.bfloat16 for call in calls)
        and torch.equal(y, sum(factor * sources[of] for factor, of in result))
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a piece in a probe: its input and its result, and whether it got the result of an encoder."""

    name: str
    given: Tensor
    result: Tensor
    crosses: bool
    beside: bool


def _called(
    layer: nn.Module,
    names: tuple[str, ...],
    halves: tuple[str, ...],
    hidden: int,
    widths: dict[str, int],
    crosses: bool,
    padded: tuple[str, ...],
    made: Callable[[int], Tensor],
    wide: bool = False,
    reads: Reads = USUAL,
    index: int = 0,
) -> tuple[Tensor, list[_Call], Tensor, tuple[None, ...] | None] | None:
    """Call the layer with pieces that return what ``made`` makes for their number of columns. Return its input, the
    calls of its pieces, its result and what is behind this, or None if it has another signature or does not call each
    piece once, with its mask."""
    x, calls, same_masks = made(hidden), [], []
    masks: dict[str, Tensor | None] = {name: made(1) for name in reads.masks} if padded else {reads.masks[0]: None}
    more: dict[str, Any] = {reads.first: made(hidden), reads.index: index} if reads.first else {}
    of_encoder = {name: made(hidden) for name in OF_ENCODER if crosses}

    def stand_in(name: str) -> nn.Module:
        def forward(*args: Tensor, **kwargs: Any) -> Any:
            given = args[0] if args else kwargs["hidden_states"]
            states = (kwargs.get("key_value_states"), kwargs.get("attention_mask"))
            result = made(widths.get(name, hidden) or given.shape[-1])
            if padded and (name in halves or name in padded):
                same_masks.append(kwargs.get("attention_mask") is masks[reads.masks[name in padded]])
            beside = bool(more) and given.shape[-1] == 2 * hidden and given[..., hidden:].equal(more[reads.first])
            of_sum = given[..., :hidden] if beside else given
            crossing = crosses and all(map(is_, states, of_encoder.values()))
            calls.append(_Call(name, of_sum.clone(), result, crossing, beside))
            return (result.clone(), None) if name in halves else result.clone()

        piece = probe_of(submodule_at(layer, name))
        own = piece._parameters  # some layers round their input to the dtype of a norm
        own |= {key: nn.Parameter(each.to(x.dtype)) for key, each in own.items() if each is not None and each.is_floating_point()}
        piece.forward = forward
        return piece

    probe = probe_with(layer, {name: stand_in(name) for name in names})
    if hasattr(probe, WIDE):
        setattr(probe, WIDE, wide)  # float32 would round the sums of a probe in float64
    try:
        y = probe(x.clone(), **masks, position_embeddings=(x, x), past_key_values=None, **of_encoder, **more)
    except (TypeError, RuntimeError, ValueError, AttributeError, KeyError):  # another signature
        return None
    behind = None
    if isinstance(y, tuple) and y and all(more is None for more in y[1:]):
        y, *more = y
        behind = tuple(more)
    if not isinstance(y, Tensor) or sorted(call.name for call in calls) != sorted(names) or not all(same_masks):
        return None
    return x, calls, y, behind


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
