# SPDX-License-Identifier: Apache-2.0
"""RMSNorm as one op instead of six torch ops: Llama's, Gemma's with its weight centered at 0, and torch's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowbit.ops.rms_norm import rms_norm
from lowbit.quant.fused import Fused, is_eager, probe_of

EPS = ("variance_epsilon", "eps")
"""The names of the attribute in different modules."""
_TOLERANCE = 2e-5
"""The allowed error relative to the max value. float32 sums in different orders differ by less; another eps or offset
makes a much larger difference."""


class FusedRMSNorm(Fused):
    """An RMSNorm that is one call of the op; `lowbit.fuse` turns a module into one in place."""

    @classmethod
    def take(cls, module: nn.Module, facts: dict[str, Any]) -> None:
        super().take(module, facts | {"said": said_eps(module)})

    def forward(self, x: Tensor) -> Tensor:
        weight = self._parameters.get("weight")  # None if the module was parametrized after fusing
        if weight is None or x.dtype is not weight.dtype or not is_eager(x) or not self.is_as_fused():
            return super().forward(x)
        return rms_norm(x, weight, self.facts["eps"], offset=self.facts["offset"])

    def is_as_fused(self) -> bool:
        """Return whether eps is still the value that the module was fused with."""
        return said_eps(self) == self.facts["said"]


def said_eps(module: nn.Module) -> tuple[Any, ...]:
    """Return the module's values of eps under each possible name."""
    inside = module.__dict__
    return inside.get(EPS[0]), inside.get(EPS[1])


@torch.no_grad()
def norm_facts(module: nn.Module) -> dict[str, float] | None:
    """Return eps and offset of a module that computes ``x * rsqrt(mean(x^2) + eps) * (offset + weight)``, or None.

    The names of its attributes are not proof. The module is called with random rows, including small ones for which eps
    matters, and its results must agree with the formula in float64.
    """
    weight, eps = getattr(module, "weight", None), eps_of(module)
    lone = isinstance(weight, nn.Parameter) and len(list(module.parameters())) == 1 and not list(module.buffers())
    if not lone or eps is None or weight.dim() != 1 or weight.is_meta or not weight.is_cpu:
        return None
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(3, weight.numel(), dtype=torch.float32, device="cpu", generator=generator)
    x *= torch.tensor([[1e-3], [1.0], [30.0]], device="cpu")
    y = result_of(module, x)
    if y is None:
        return None
    wide = x.double()
    normalized = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    for offset in (0.0, 1.0):
        wanted = normalized * (offset + weight.double())
        if agree(y, wanted):
            return {"eps": eps, "offset": offset}
    return None


def result_of(module: nn.Module, x: Tensor) -> Tensor | None:
    """Return what a norm makes of rows, or None if it takes other arguments or its result has another shape."""
    try:
        y = probe_of(module)(x)
    except (TypeError, RuntimeError, ValueError):
        return None
    return y if isinstance(y, Tensor) and y.shape == x.shape else None


def agree(y: Tensor, wanted: Tensor) -> bool:
    """Whether rows are those of a formula in float64."""
    return bool(((y - wanted).abs().amax(-1) <= _TOLERANCE * wanted.abs().amax(-1)).all())


def eps_of(module: nn.Module) -> float | None:
    """Return the value that a norm adds to the mean of squares, or None if it has no such attribute."""
    values = (getattr(module, name, None) for name in EPS)
    return next((float(value) for value in values if isinstance(value, (int, float))), None)
