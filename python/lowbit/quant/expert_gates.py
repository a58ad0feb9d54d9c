# SPDX-License-Identifier: Apache-2.0
"""The step between the two products of a module of experts, as the op `experts` can take it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.ops.experts import ACTIVATIONS, Gate, gated_value
from lowbit.quant.experts import Form, gate, parts_in_float64

_ALPHAS = (1.0, 1.702)
_TOLERANCE = 1e-6  # of float64 results: some classes compute a part in float32
_known: dict[tuple[Any, ...], Gate | None] = {}
"""The results of `_found` for modules that are alike."""


@dataclass(frozen=True, slots=True)
class KnownGate:
    """A step that the op has, and what it was found from: with other values, the class computes another one."""

    gate: Gate
    activation: Any
    numbers: tuple[float, ...]

    @classmethod
    def of(cls, module: Any, form: Form, float_class: type[nn.Module]) -> KnownGate | None:
        """Compare the step of a module with those of the op, in float64; None: it is none of them."""
        activation, numbers = _activation(module), _numbers(module)
        key = float_class, form.gated, form.interleaved, repr(activation), numbers
        if key not in _known:
            _known[key] = _found(module, form, float_class, numbers)
        found = _known[key]
        return None if found is None else cls(found, activation, numbers)

    def holds(self, module: Any) -> bool:
        """Whether the module still computes it; a hook on its activation waits for a call."""
        activation = _activation(module)
        return (
            activation is self.activation
            and _numbers(module) == self.numbers
            and not (isinstance(activation, nn.Module) and (activation._forward_hooks or activation._forward_pre_hooks))
        )


def _activation(module: Any) -> Any:
    inside = module.__dict__
    return inside["_modules"].get("act_fn") or inside.get("act_fn")


def _numbers(module: Any) -> tuple[float, ...]:
    return tuple(value for value in module.__dict__.values() if type(value) is float)


def _found(module: Any, form: Form, float_class: type[nn.Module], numbers: tuple[float, ...]) -> Gate | None:
    """Try each activation with each number of the module as its alpha and limit, and clamped or not."""
    generator = torch.Generator().manual_seed(0)
    hidden = 8 * torch.randn(64, 32, generator=generator, dtype=torch.float64, device="cpu")
    numbers += tuple(value for name in dir(float_class) if type(value := getattr(float_class, name)) is float)
    own = float_class.__new__(float_class)
    own.__dict__ = module.__dict__ | {"_modules": parts_in_float64(module)}
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            wanted = gate(own, float_class, form, hidden)
    except Exception:  # the class is the caller's, and may raise anything
        return None
    positive = sorted({number for number in numbers if number > 0})
    others = itertools.product((*_ALPHAS, *positive), (0.0, *positive), (0.0, 1.0))
    for activation, (alpha, limit, offset) in itertools.product(range(len(ACTIVATIONS)), [*others]):
        tried = Gate(activation, form.gated, form.interleaved, alpha, limit, offset)
        if _is_close(gated_value(hidden, tried), wanted):
            return tried._replace(interleaved=False)  # rows that took turns are packed one after the other
    return None


def _is_close(got: Tensor, wanted: Tensor) -> bool:
    return got.shape == wanted.shape and bool((got - wanted).norm() <= _TOLERANCE * wanted.norm())
