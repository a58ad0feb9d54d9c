# SPDX-License-Identifier: Apache-2.0
"""RMSNorm in one call (torch takes six): Llama's, Gemma's with its weight centered at 0, torch's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowbit.ops.rms_norm import rms_norm
from lowbit.quant.fused import Fused, is_inference, probe_of

EPS = ("variance_epsilon", "eps")
"""The names that modules give it."""
_TOLERANCE = 2e-5
"""The allowed error, as a share of the largest value, between float32 in two orders of summation; another eps or offset
differs by far more."""


class FusedRMSNorm(Fused):
    """An RMSNorm as one call of the op; made in place by `lowbit.fuse`."""

    @classmethod
    def take(cls, module: nn.Module, facts: dict[str, Any]) -> None:
        super().take(module, facts | {"said": said_eps(module)})

    def forward(self, x: Tensor) -> Tensor:
        weight = self._parameters.get("weight")  # none where it was parametrized since
        if weight is None or x.dtype is not weight.dtype or not is_inference(x) or not self.is_as_fused():
            return super().forward(x)
        return rms_norm(x, weight, self.facts["eps"], offset=self.facts["offset"])

    def is_as_fused(self) -> bool:
        """Whether its eps is still the one that it was fused with."""
        return said_eps(self) == self.facts["said"]


def said_eps(module: nn.Module) -> tuple[Any, ...]:
    """The module's values under each of the names."""
    inside = module.__dict__
    return inside.get(EPS[0]), inside.get(EPS[1])


@torch.no_grad()
def norm_facts(module: nn.Module) -> dict[str, float] | None:
    """Return eps and offset of a module that computes ``x * rsqrt(mean(x^2) + eps) * (offset + weight)``, or None.

    Names only suggest it: the module is given random rows, small ones too, where eps counts, and has to give the
    formula's result in float64.
    """
    weight, eps = getattr(module, "weight", None), _eps_of(module)
    lone = isinstance(weight, nn.Parameter) and len(list(module.parameters())) == 1 and not list(module.buffers())
    if not lone or eps is None or weight.dim() != 1 or weight.is_meta or not weight.is_cpu:
        return None
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(3, weight.numel(), dtype=torch.float32, device="cpu", generator=generator)
    x *= torch.tensor([[1e-3], [1.0], [30.0]], device="cpu")
    try:
        y = probe_of(module)(x)
    except (TypeError, RuntimeError, ValueError):  # it takes something else
        return None
    if not isinstance(y, Tensor) or y.shape != x.shape:
        return None
    wide = x.double()
    normalized = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    for offset in (0.0, 1.0):
        wanted = normalized * (offset + weight.double())
        if ((y - wanted).abs().amax(-1) <= _TOLERANCE * wanted.abs().amax(-1)).all():
            return {"eps": eps, "offset": offset}
    return None


def _eps_of(module: nn.Module) -> float | None:
    values = (getattr(module, name, None) for name in EPS)
    return next((float(value) for value in values if isinstance(value, (int, float))), None)
