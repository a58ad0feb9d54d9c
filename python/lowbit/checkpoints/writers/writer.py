# SPDX-License-Identifier: Apache-2.0
"""Writer, the base class of the layouts in which packed weights are written, and what they share: the codes, scales and
zero points of a layer, and whether a layout holds them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lowbit import _C
from lowbit.quant.codes import CodedWeight, bit_stream

_WORD = 32  # bits


@dataclass(frozen=True, slots=True)
class CodedLayer:
    """A packed weight that a checkpoint stores under a name of its own.

    Args:
        name: the name of its layer in the checkpoint.
        path: the name of its layer in the model, which may be another.
        coded: codes, scales and zero points.
        permutation: the inputs of the columns, or None: as they come.
        is_head: whether the layer is the output head of a language model.
    """

    name: str
    path: str
    coded: CodedWeight
    permutation: Tensor | None = None
    is_head: bool = False

    @property
    def n(self) -> int:
        return self.coded.codes.shape[0]

    @property
    def k(self) -> int:
        return self.coded.codes.shape[1]

    @property
    def bits(self) -> int:
        return _C.FORMAT_FACTS[self.coded.spec.format]["bits"]

    @property
    def middle(self) -> int:
        """The zero point of symmetric codes."""
        return 2 ** (self.bits - 1)

    @property
    def scale(self) -> Tensor:
        """The scales, float64 ``[n, groups]``: the products of their stored factors, exactly."""
        column, group = self.coded.column_scale.double()[:, None], self.coded.group_scale
        return column if group is None else column * group.double()

    @property
    def meta(self) -> CodedLayer:
        """The same layer without values, from which a writer makes tensors without values."""
        coded, permutation = self.coded, self.permutation
        names = ("codes", "column_scale", "group_scale", "zero")
        parts = {name: part.to("meta") for name in names if (part := getattr(coded, name)) is not None}
        order = None if permutation is None else permutation.to("meta")
        return replace(self, coded=replace(coded, **parts), permutation=order)

    def codes_of_inputs(self) -> Tensor:
        """Return the codes with their columns in the order of the inputs."""
        codes = self.coded.codes
        if self.permutation is None:
            return codes
        in_order = torch.empty_like(codes)
        in_order[:, self.permutation] = codes
        return in_order

    def zero_points(self) -> Tensor:
        """Return the zero points, uint8 ``[n, groups]``; those of symmetric codes too."""
        if self.coded.zero is None:
            return torch.full(self.scale.shape, self.middle, dtype=torch.uint8, device=self.coded.codes.device)
        return self.coded.zero.to(torch.uint8)


class Writer(ABC):
    """A layout of another package. `add` takes all layers of a model, one after another, and `tensors` writes them.

    Args:
        dtype: the dtype of the model, in which a package computes.
    """

    name: ClassVar[str]

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    @abstractmethod
    def add(self, layer: CodedLayer) -> None:
        """Take a layer.

        Raises:
            ValueError: the layout does not hold its codes, scales or zero points exactly. The message names it.
        """

    @abstractmethod
    def tensors(self, layer: CodedLayer) -> dict[str, Tensor]:
        """Return the tensors of a layer that was added, by what follows its name."""

    @abstractmethod
    def settings(self, floats: Sequence[str]) -> dict[str, Any]:
        """Return the entry ``quantization_config`` of the config.json. ``floats`` are layers without codes."""

    def error(self, layer: CodedLayer, why: str) -> ValueError:
        """Return the error for a layer that the layout does not hold."""
        told = f" ({layer.coded.spec.name})"
        return ValueError(f"save: {self.name} does not hold {layer.name}{told}: {why}")

    def check_integers(self, layer: CodedLayer, bits: Sequence[int]) -> None:
        """Raise ValueError unless a layer has integers of one of these numbers of bits."""
        if layer.coded.spec.format not in {f"int{each}" for each in bits}:
            raise self.error(layer, f"codes must be integers of {', '.join(map(str, bits))} bits")

    def group_size(self, layer: CodedLayer) -> int:
        """Return how many neighbours share a scale, or -1 for whole rows.

        Raises:
            ValueError: the last group of a row is shorter.
        """
        size = layer.coded.spec.group_size
        if size and layer.k % size:
            raise self.error(layer, f"k must be a multiple of the group size, got k={layer.k}")
        return size or -1

    def check_zero_points(self, layer: CodedLayer, largest: int) -> None:
        """Raise ValueError unless zero points are integers from 0 to ``largest``."""
        zero = layer.coded.zero
        if zero is not None and not ((zero == zero.round()) & (zero >= 0) & (zero <= largest)).all():
            got = f"{float(zero.min()):g} to {float(zero.max()):g}"
            raise self.error(layer, f"zero points must be integers from 0 to {largest}, got {got}")


def holds(dtype: torch.dtype, values: Tensor) -> bool:
    """Return whether a dtype holds these float64 values exactly."""
    return torch.equal(values.to(dtype).double(), values)


def words(codes: Tensor, bits: int) -> Tensor:
    """Return codes as a stream of bits along each row, int32 ``[rows, ceil(count * bits / 32)]``, padded with zeros."""
    count = codes.shape[1]
    whole = nn.functional.pad(codes, (0, -count % _WORD))
    used = -(-count * bits // _WORD)
    stream = bit_stream(whole, bits).clone(memory_format=torch.contiguous_format)  # size 1 allows any stride
    return stream.view(torch.int32)[:, :used].contiguous()
