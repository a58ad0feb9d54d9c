# SPDX-License-Identifier: Apache-2.0
"""Packed layers whose weight says a float dtype, for models that read that alone.

Mamba's models cast the input of their head to ``lm_head.weight.dtype``, and a packed weight is uint8. The class of such a
head is a subclass in which ``weight`` is the packed parameter but for this name; the parameter itself, its state dict and
its forward are those of the packed layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lowbit.quant.quant_linear import QuantLinear

_TYPE = "tensor_of_type"
_typed: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The typed weight of each packed parameter, so that a layer has one."""


class _TypedWeight(nn.Parameter):
    """A packed weight that says another dtype. Ops compute with its bytes."""

    told: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        return self.told

    def __repr__(self, **_: Any) -> str:
        return f"packed weight for inputs in {self.told}: {self.detach()!r}"


class TypedQuantLinear(QuantLinear):
    """A packed layer that says in which dtype the model computes; ``model.to(dtype)`` changes that."""

    @property
    def weight(self) -> nn.Parameter:
        packed = self.W_q
        typed = _typed.get(packed)
        if typed is None or typed.data_ptr() != packed.data_ptr():  # `.data` may have been set
            typed = _typed[packed] = Tensor._make_subclass(_TypedWeight, packed, False)
        typed.told = self.__dict__[_TYPE].dtype
        return typed

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TypedQuantLinear:
        super()._apply(fn, recurse)
        self.__dict__[_TYPE] = fn(self.__dict__[_TYPE])
        return self


PRODUCTS = (QuantLinear, TypedQuantLinear)
"""The classes of a layer that is one product with a packed weight."""


def say_dtype(layer: nn.Module, dtype: torch.dtype) -> None:
    """Let the weight of a packed layer say ``dtype``; a layer that is of a subclass of its own stays as it is."""
    if type(layer) is QuantLinear:
        layer.__dict__[_TYPE] = torch.empty(0, dtype=dtype, device="cpu")
        layer.__class__ = TypedQuantLinear
    elif not isinstance(layer, TypedQuantLinear):  # it became float again
        layer.__dict__.pop(_TYPE, None)
