# SPDX-License-Identifier: Apache-2.0
"""Algorithms that choose the codes of a weight better than rounding each value to the nearest code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class GPTQ:
    """The GPTQ algorithm: input channels are rounded one after another, and the channels that are not yet rounded
    compensate for the error (Frantar et al., arXiv 2210.17323).

    Needs ``quantize_(..., calibration=lowbit.calibrate(model, batches, hessian=True))``.

    Args:
        act_order: round the channels with the largest activations first. Scales are then computed from the original
            weight.
        damping: the value added to the diagonal of the second moments, as a fraction of its mean.

    Raises:
        ValueError: damping is not above 0.
    """

    act_order: bool = True
    damping: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.damping < float("inf"):
            raise ValueError(f"GPTQ: damping must be above 0, got damping={self.damping!r}")


@dataclass(frozen=True, slots=True)
class HQQ:
    """Half-quadratic quantization: real-valued zero points are optimized so that the error is sparse (Badri and Shaji,
    2023).

    Needs no data. The weights become asymmetric.

    Args:
        iterations: the max number of iterations.
        p: the exponent of the norm |error|^p, above 0 and at most 1.
        beta, kappa: the initial penalty, and its growth factor per iteration; both above 0.

    Raises:
        ValueError: an argument is out of range.
    """

    iterations: int = 20
    p: float = 0.7
    beta: float = 10.0
    kappa: float = 1.01

    def __post_init__(self) -> None:
        if type(self.iterations) is not int or self.iterations < 1:
            raise ValueError(f"HQQ: iterations must be an int of at least 1, got iterations={self.iterations!r}")
        if not 0 < self.p <= 1:
            raise ValueError(f"HQQ: p must be above 0 and at most 1, got p={self.p!r}")
        for name in ("beta", "kappa"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"HQQ: {name} must be above 0, got {name}={getattr(self, name)!r}")


Algorithm = GPTQ | HQQ


def algorithm_of(function: str, algorithm: Any) -> Algorithm | None:
    """Check and return an algorithm; None means that each weight is rounded to its nearest code."""
    if algorithm is None or isinstance(algorithm, (GPTQ, HQQ)):
        return algorithm
    raise TypeError(f"{function}: algorithm must be lowbit.GPTQ(), lowbit.HQQ() or None, got algorithm={algorithm!r}")
