# SPDX-License-Identifier: Apache-2.0
"""Algorithms that find the codes of a weight where rounding each weight to its nearest code is not enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class GPTQ:
    """Round one input channel after the other, and let the channels that follow make up for its error (Frantar et al.,
    arXiv 2210.17323). Needs ``quantize_(..., calibration=lowbit.calibrate(model, batches, hessian=True))``.

    Args:
        act_order: channels with the largest activations first; scales are then those of the weight as it was.
        damping: added to the diagonal of the second moments, as a part of its mean.

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
    """Choose real zero points that make the error sparse (Badri and Shaji, half-quadratic quantization, 2023). Needs no
    data; weights become asymmetric.

    Args:
        iterations: the max number of iterations.
        p: the exponent of the norm |error|^p, at most 1.
        beta, kappa: the first penalty, and its growth per iteration.

    Raises:
        ValueError: a number is out of its range.
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
    """Check an algorithm; None rounds each weight to its nearest code."""
    if algorithm is None or isinstance(algorithm, (GPTQ, HQQ)):
        return algorithm
    raise TypeError(
        f"{function}: algorithm must be lowbit.GPTQ(), lowbit.HQQ() or None, got algorithm={algorithm!r}"
    )
