# SPDX-License-Identifier: Apache-2.0
"""The step between the two products of a module of experts, as the op `experts` takes it.

A class of transformers writes this step in Python: a product of an activation, between clamps, with a scale inside, an
offset. Which of the op's steps it is, if any, is found by comparing both in float64, from sums of 2^-6 to 2^40, so that
every clamp cuts some of them; numbers of the module are tried as the scale and the limit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.ops.experts import ACTIVATIONS, Gate, gated_value
from lowbit.quant.experts import Form, gate, parts_in_float64

_EXPONENTS = (2, -6, -3, 0, 4, 6, 9, 12, 16, 20, 30, 40)  # powers of 2 for the sums; most gates differ at the first
_ALPHA = 1.702  # gpt-oss, and gelu's approximation by a sigmoid
_TOLERANCE = 1e-6  # relative to the gate of absolute sums: some classes compute it in float32


def known_gate(module: Any, cls: type[nn.Module], form: Form, n: int) -> Gate | None:
    """Return the step of the op that ``cls`` computes with the attributes of ``module``, in training and otherwise.

    Args:
        module: float or packed; its rows of the first product are those of ``form``.
        cls: its class as a float module.
        n: the columns of the first product.

    Returns:
        The step for packed weights, whose rows of gate and up are one after the other where ``form.interleaved``;
        None: the op has no such step, or an activation has parameters, whose values may change.
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
        except Exception:  # the class is the caller's, and may raise anything
            return None
    tried = (each for each in _gates(form, _numbers(module, cls)) if all(_is(each, sums, of) for of in results))
    found = next(tried, None)
    return found if found is None or not form.interleaved else found._replace(interleaved=False)


def _numbers(module: Any, cls: type[nn.Module]) -> list[float]:
    """Every number above 0 that the module or its class has, as limits of its step may be."""
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
    """Whether every element is close, size by size: the first one differs for most."""
    return len(results) == len(sums) and all(
        _is_close(gated_value(row, tried), result, gated_value(row.abs(), tried))
        for row, result in zip(sums, results, strict=True)
    )


def _is_close(got: Tensor, wanted: Tensor, size: Tensor) -> bool:
    return got.shape == wanted.shape and bool(((got - wanted).abs() <= _TOLERANCE * size).all())
