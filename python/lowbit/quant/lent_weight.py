# SPDX-License-Identifier: Apache-2.0
"""Packed layers whose ``weight`` is the decoded float one, for code of other packages that reads it.

The class of such a layer is a subclass of its own in which ``weight`` is a property; its forward, state dict and
parameters are those of the packed layer. `lent` gives one to a single call, which other threads do not see;
`lending` lends the weights of a whole model while a package looks at it, one decoded weight at a time. Experts lend no
numbers, only the shapes of their weights (`lending_shapes`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.quant.kinds import LayerWeight, kind_of, weight_in, weights_of

_LOAN = "loan_of_weight"


class _Loan:
    """The decoded weight of the layer that was asked last."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.packed: Tensor | None = None
        self.decoded: nn.Parameter | None = None

    def weight_of(self, layer: Any) -> nn.Parameter:
        (weight,) = weights_of(layer)
        packed = layer._parameters[weight.key]
        if self.packed is not packed:
            self.decoded = None  # one at a time
            dtype = kind_of(layer).dtype_of(layer, self.dtype)
            self.decoded = nn.Parameter(layer.dequantize(dtype).detach(), requires_grad=False)
            self.packed = packed
        return self.decoded


@functools.cache
def _lending_class(cls: type[nn.Module]) -> type[nn.Module]:
    def weight(self: nn.Module) -> nn.Parameter:
        return self.__dict__[_LOAN].weight_of(self)

    return type(cls.__name__, (cls,), {weight_in(""): property(weight), "__module__": __name__})


def lent(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a layer with the state of a packed one whose ``weight`` is decoded when it is first read; ``dtype``: that
    of the weight, where the layer has none of its own."""
    cls = _lending_class(type(layer))
    view = cls.__new__(cls)
    view.__dict__ = layer.__dict__ | {_LOAN: _Loan(dtype)}
    return view


@contextlib.contextmanager
def lending(layers: Iterable[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """Let the packed layers lend their weights inside of the block, those that have one matrix. What is written into
    it is lost."""
    loan = _Loan(dtype)
    layers = [layer for layer in layers if [weight.experts for weight in weights_of(layer)] == [None]]
    for layer in layers:
        layer.__dict__[_LOAN] = loan
        layer.__class__ = _lending_class(type(layer))
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = type(layer).__mro__[1]
            del layer.__dict__[_LOAN]


def without_numbers(layer: nn.Module, weight: LayerWeight) -> Tensor:
    """Return a float32 tensor with the shape and the device of a float weight, which takes no memory: each of its
    elements is nan."""
    packed = layer._parameters[weight.key]
    return packed.new_full((), float("nan"), dtype=torch.float32).expand(weight.float_shape)


@functools.cache
def _shape_class(cls: type[nn.Module], keys: tuple[str, ...]) -> type[nn.Module]:
    def of(key: str) -> property:
        return property(lambda self: without_numbers(self, next(one for one in weights_of(self) if one.key == key)))

    return type(cls.__name__, (cls,), {key: of(key) for key in keys} | {"__module__": __name__})


@contextlib.contextmanager
def lending_shapes(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Let packed experts have, inside of the block, tensors of the float shapes under the names of their weights. Their
    parameters are the packed ones."""
    layers = [layer for layer in layers if any(weight.experts is not None for weight in weights_of(layer))]
    for layer in layers:
        layer.__class__ = _shape_class(type(layer), tuple(weight.key for weight in weights_of(layer)))
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = type(layer).__mro__[1]
