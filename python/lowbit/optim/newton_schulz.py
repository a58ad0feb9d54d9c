# SPDX-License-Identifier: Apache-2.0
"""Orthogonalization of a matrix by Newton-Schulz steps, as Muon needs it (Jordan et al., 2024).

A step is X <- a X + (b A + c A^2) X with A = X X^T, whose singular values go towards 1. Three things save work here.
A and its polynomials are symmetric, so half of each product is computed and mirrored. A wide matrix is multiplied twice
alone: all steps are polynomials of the same A, so they are taken on A, and their product times X is the result. And
float32 is used where the processor does not multiply bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 256  # rows of a symmetric product that are computed together
_WIDE = 1.5  # columns per row from which on the steps are taken on A
_GROWTH = 2.0**15  # of the error of A, 2^-24 at first, in the steps between two products with X


def fastest_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 on a device, and on a CPU that multiplies it; otherwise float32."""
    if device.type != "cpu" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return torch.bfloat16
    return torch.float32


def orthogonalize(
    matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float, dtype: torch.dtype
) -> Tensor:
    """Return the matrix with singular values near 1, computed in ``dtype``.

    Args:
        matrix: ``[m, n]``.
        coefficients: a, b and c of a step.
        steps: number of steps.
        eps: the smallest norm that the matrix is divided by.
        dtype: float32 or bfloat16.
    """
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = (x / torch.linalg.vector_norm(x).clamp(min=eps)).to(dtype)
    # In bfloat16 the squares in A would lose small singular values.
    at_once = _steps_at_once(coefficients[0]) if dtype == torch.float32 and x.shape[1] >= _WIDE * x.shape[0] else 1
    while steps > 0:
        taken = min(steps, at_once)
        x = (_steps_on_gram if taken > 1 else _step)(x, coefficients, taken)
        steps -= taken
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def _steps_at_once(a: float) -> int:
    """Return how many steps may be taken on A: each multiplies its smallest eigenvalues, and their errors, by a^2."""
    steps = 2
    while steps < 99 and abs(a) ** (2 * steps) <= _GROWTH:
        steps += 1
    return steps


def _step(x: Tensor, coefficients: tuple[float, float, float], _: int) -> Tensor:
    a, b, c = coefficients
    gram = _symmetric_product(x, x.T)
    return torch.addmm(x, _symmetric_product(gram, gram, gram, b, c), x, beta=a)


def _steps_on_gram(x: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """Take the steps X_k+1 = P_k X_k, P_k = a + b A_k + c A_k^2, as A_k+1 = P_k^2 A_k; the result is P_k .. P_0 X."""
    gram = _symmetric_product(x, x.T)
    product = factor = _factor(gram, coefficients)
    for _ in range(1, steps):
        gram = _symmetric_product(factor, _symmetric_product(factor, gram))
        factor = _factor(gram, coefficients)
        product = _symmetric_product(factor, product)
    return product @ x


def _factor(gram: Tensor, coefficients: tuple[float, float, float]) -> Tensor:
    """Return a + b A + c A^2."""
    a, b, c = coefficients
    factor = _symmetric_product(gram, gram, gram, b, c)
    factor.diagonal().add_(a)
    return factor


def _symmetric_product(
    left: Tensor, right: Tensor, plus: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0
) -> Tensor:
    """Return alpha left @ right + beta plus, which is known to be symmetric."""
    size = left.shape[0]
    out = left.new_empty(size, size)
    for start in range(0, size, _BLOCK):
        stop = min(start + _BLOCK, size)
        rows = out[start:stop, :stop]
        if plus is None:
            torch.mm(left[start:stop], right[:, :stop], out=rows)
        else:
            torch.addmm(plus[start:stop, :stop], left[start:stop], right[:, :stop], beta=beta, alpha=alpha, out=rows)
        out[:start, start:stop] = rows[:, :start].T
    return out
