# SPDX-License-Identifier: Apache-2.0
"""The gate between the two products of a module of experts, in the form that the op `experts` takes.

Classes of transformers implement it in Python: an activation times the other half, possibly with clamps, a scale inside
the activation, and an offset. To find the op's gate that computes the same, if there is one, both are compared in
float64. The inputs have magnitudes from 2^-6 to 2^40, so that every clamp takes effect on some of them. Numeric
attributes of the module are the candidates for the scale and the limit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.ops.experts import ACTIVATIONS, Gate, gated_value
from lowbit.quant.experts import Form, gate, parts_in_float64

_EXPONENTS = (2, -6, -3, 0, 4, 6, 9, 12, 16, 20, 30, 40)  # exponents of the inputs; at the first most gates differ
_ALPHA = 1.702  # the scale of gpt-oss, and of gelu's approximation by a sigmoid
_TOLERANCE = 1e-6  # relative to the gate of the absolute inputs; some classes compute the gate in float32


def known_gate(module: Any, cls: type[nn.Module], form: Form, n: int) -> Gate | None:
    """Return the op's gate that ``cls`` computes with the attributes of ``module``, in training and in evaluation mode.

    Args:
        module: a float or packed module of experts.
        cls: the class of the float module.
        form: the form of the module's weights.
        n: the number of columns of the first product.

    Returns:
        The gate for packed weights, which is not interleaved, because packing puts all rows of the gate before those of
        up. None if the op has no such gate, or if a submodule has parameters or buffers, whose values may change.
    """
    parts = parts_in_float64(module)
    if any(True for part in parts.values() if part for _ in itertools.chain(part.parameters(), part.buffers())):
        return None
    generator = torch.Generator().manual_seed(0)
    sums = torch.randn(len(_EXPONENTS), n, generator=generator, dtype=torch.float64, device="cpu")
    sums *= torch.tensor([2.0**exponent for exponent in _EXPONENTS], dtype=torch.float64, device="cpu")[:, None]
    results = []
    for training in (False, True):
        own = cls.__new__(cls)
        own.__dict__ = module.__dict__ | {"_modules": parts}
        own.train(training)
        try:
            with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
                results.append(gate(own, cls, form, sums))
        except Exception:  # the class is the caller's and may raise anything
            return None
    tried = (each for each in _gates(form, _numbers(module, cls)) if all(_is(each, sums, of) for of in results))
    found = next(tried, None)
    return found if found is None or not form.interleaved else found._replace(interleaved=False)


def _numbers(module: Any, cls: type[nn.Module]) -> list[float]:
    """Return every positive number among the attributes of the module and its class: candidates for a limit."""
    held = itertools.chain(*(vars(of).values() for of in (*cls.__mro__, module)))
    return sorted({float(value) for value in held if type(value) in (int, float) and 0 < value < 1e6})


def _gates(form: Form, numbers: list[float]) -> Iterator[Gate]:
    for activation, name in enumerate(ACTIVATIONS):
        alphas = (1.0, _ALPHA, *numbers) if name == "silu" else (1.0,)
        if not form.gated:
            yield from (Gate(activation, False, False, alpha, 0.0, 0.0) for alpha in alphas)
            continue
        orders = (True,) if form.interleaved else (False, True)
        for numbers_of_one in itertools.product(orders, alphas, (0.0, *numbers), (0.0, 1.0)):
            yield Gate(activation, True, *numbers_of_one)


def _is(tried: Gate, sums: Tensor, results: Tensor) -> bool:
    """Return whether all results are close. Rows are compared one after another, since most gates differ at the first
    row."""
    return len(results) == len(sums) and all(
        _is_close(gated_value(row, tried), result, gated_value(row.abs(), tried))
        for row, result in zip(sums, results, strict=True)
    )


def _is_close(got: Tensor, wanted: Tensor, size: Tensor) -> bool:
    return got.shape == wanted.shape and bool(((got - wanted).abs() <= _TOLERANCE * size).all())
