# SPDX-License-Identifier: Apache-2.0
"""ErrorMetric: how much an error of a weight counts, by the inputs that the layer has or is likely to have.

An error e ``[k]`` of a row changes the output by e x. The mean square of that is e H e^T with H = mean of x x^T, here

    H = diag(h) + V V^T

with few directions V ``[k, q]``, so that the metric of a weight takes n k q operations rather than n k^2. A few
directions are most of H: of a language model's inputs the first 16 hold what all of them do (SmolLM2: products of a
merge err by 0.099 of the change in squares with 16, by 0.097 with 128).

Where inputs are not known, the change D of the weight tells of them: an adapter learns directions of inputs, and most
of a channel with large inputs. So V are the directions that D reads, and h is the mean square of a column of D.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.quant.input_moments import InputMoments

DIRECTIONS = 32
"""The most directions of a metric."""
RATIO = 150.0
"""The weight of directions that a change reads, beside a mean square of 1 in all others. Inputs of SmolLM2 have 5 to 30
times that there; yet errors of layers in other directions hardly add up, while what is lost of an adapter does. KL in
nats from the adapter beside the base, 12 texts: 0.030 with 150, 0.025 with 400; 8 texts: 0.150, 0.077 and 0.037
with 10, 30 and 100."""
LARGEST_CHANNEL = 100.0
"""No channel counts more than this many times the mean, nor less than its inverse."""
LEAST_LEFT = 0.05
"""The least part of a channel's mean square that is taken to be outside of the main directions."""
SMALLEST = 1e-6
"""Directions with a smaller part of the largest square are none."""
_STEPS = 3  # of the power method


@dataclass(frozen=True, slots=True)
class ErrorMetric:
    """A symmetric positive matrix diag(h) + V V^T, which measures errors.

    Args:
        squares: h, float32 ``[k]``.
        directions: V, float32 ``[k, q]``.
    """

    squares: Tensor
    directions: Tensor

    @classmethod
    def of(cls, changes: Sequence[Tensor], inputs: InputMoments | None) -> ErrorMetric:
        """Return the metric for the changes of rows of a weight, each ``[rows, k]``; not all of them are zero."""
        if inputs is not None:
            return cls._of_inputs(inputs.hessian)
        largest = max(float(one.abs().max()) for one in changes)
        count = changes[0].shape[1]

        def applied(to: Tensor) -> Tensor:  # D^T D, without the square of a number that float32 does not hold
            return functools.reduce(operator.add, (one.T @ ((one @ to) / largest) / largest for one in changes))

        directions, _ = _main_directions(applied, count)
        squares = functools.reduce(operator.add, ((one / largest).square_().sum(0) for one in changes))
        return cls((squares / squares.mean()).clamp(LARGEST_CHANNEL**-1, LARGEST_CHANNEL), RATIO**0.5 * directions)

    @classmethod
    def _of_inputs(cls, hessian: Tensor) -> ErrorMetric:
        """Return diag(h) + V V^T with the diagonal of H, and its main directions by units of each channel."""
        diagonal = hessian.diagonal() / (float(hessian.diagonal().mean()) or 1.0)
        unit = diagonal.clamp(min=1 / LARGEST_CHANNEL).sqrt()[:, None]
        scale = (float(hessian.diagonal().mean()) or 1.0) * unit
        vectors, values = _main_directions(lambda to: (hessian @ (to / unit)) / scale, len(hessian))
        directions = vectors * values.clamp(min=0).sqrt()
        left = (1 - directions.square().sum(1)).clamp(min=LEAST_LEFT)
        return cls(left * unit[:, 0].square(), directions * unit)

    def products(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a (diag(h) + V V^T) b^T for each row of ``[n, k]``: float32 ``[n]``."""
        return torch.linalg.vecdot(a * self.squares, b) + ((a @ self.directions) * (b @ self.directions)).sum(1)


def _main_directions(applied: Callable[[Tensor], Tensor], count: int) -> tuple[Tensor, Tensor]:
    """Return orthonormal eigenvectors ``[count, q]`` with the largest eigenvalues ``[q]`` of a symmetric matrix that is
    not negative, given its product with ``[count, p]``."""
    probe = torch.randn(
        count, min(count, DIRECTIONS + 8), generator=torch.Generator("cpu").manual_seed(0), device="cpu"
    )
    for _ in range(_STEPS):
        probe = torch.linalg.qr(applied(probe))[0]
    values, vectors = torch.linalg.eigh(probe.T @ applied(probe))
    values, vectors = values[-DIRECTIONS:], vectors[:, -DIRECTIONS:]
    some = values > SMALLEST * values[-1]
    return probe @ vectors[:, some], values[some]
