# SPDX-License-Identifier: Apache-2.0
"""LayerNorm as one op that can also be a step of a program: torch's, with or without weight and bias, Cohere's,
OLMo's, Nemotron's with its weight centered at 0."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowbit.ops.layer_norm import layer_norm
from lowbit.quant.fused import Fused, is_inference, probe_of
from lowbit.quant.fused_norm import agree, result_of, said_eps

_OF_TORCH = 1e-5
"""The eps of a module that does not name it."""


class FusedLayerNorm(Fused):
    """A LayerNorm that is one call of the op; `lowbit.fuse` turns a module into one in place."""

    @classmethod
    def take(cls, module: nn.Module, facts: dict[str, Any]) -> None:
        super().take(module, facts | {"said": said_eps(module)})

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.operands()
        known = all(name in ("weight", "bias") for name in self._parameters)  # not parametrized after fusing
        if not known or not is_inference(x) or not self.is_as_fused():
            return super().forward(x)
        if any(of is not None and of.dtype is not x.dtype for of in (weight, bias)):
            return super().forward(x)
        return layer_norm(x, weight, bias, self.facts["eps"], offset=self.facts["offset"])

    def operands(self) -> tuple[Tensor | None, Tensor | None]:
        """Return weight and bias, each or None."""
        return self._parameters.get("weight"), self._parameters.get("bias")

    def is_as_fused(self) -> bool:
        """Return whether eps, weight and bias are still there as when the module was fused."""
        given = tuple(of is not None for of in self.operands())
        return said_eps(self) == self.facts["said"] and given == self.facts["given"]


@torch.no_grad()
def layer_norm_facts(module: nn.Module) -> dict[str, Any] | None:
    """Return eps, offset and which of weight and bias there are, of a module that computes a LayerNorm; or None.

    The module is called with random rows around different means, including small ones for which eps matters, and its
    results must agree with the formula in float64.
    """
    parameters = dict(module._parameters)
    weight, bias = parameters.pop("weight", None), parameters.pop("bias", None)
    shape = getattr(module, "normalized_shape", ())
    n = weight.numel() if weight is not None else shape[0] if len(shape) == 1 else None
    if parameters or module._modules or any(True for _ in module.buffers()) or n is None:
        return None
    if any(of is not None and (of.dim() != 1 or of.is_meta or not of.is_cpu) for of in (weight, bias)):
        return None
    eps = next((float(eps) for eps in said_eps(module) if isinstance(eps, (int, float))), _OF_TORCH)
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(3, n, dtype=torch.float32, device="cpu", generator=generator)
    x = x * torch.tensor([[1e-3], [1.0], [30.0]], device="cpu") + torch.tensor([[0.0], [2.0], [-5.0]], device="cpu")
    widened = probe_of(module)  # torch's takes no float32 rows beside 16-bit weights
    given = {name: of for name, of in (("weight", weight), ("bias", bias)) if of is not None}
    widened._parameters |= {name: of.detach().float() for name, of in given.items()}
    y = result_of(widened, x)
    if y is None:
        return None
    for offset in (0.0, 1.0) if weight is not None else (0.0,):
        factor = None if weight is None else weight.double() + offset
        wanted = nn.functional.layer_norm(x.double(), (n,), factor, None if bias is None else bias.double(), eps)
        if agree(y, wanted):
            return {"eps": eps, "offset": offset, "given": (weight is not None, bias is not None)}
    return None
