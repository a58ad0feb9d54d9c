# SPDX-License-Identifier: Apache-2.0
"""Modules that make a decay for each channel of a gated delta net (Kimi-Linear, Bailing-hybrid):

g = -exp(A_log) softplus(f(x) + dt_bias),   f one linear layer or two
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowbit.quant.fused import hooked, probe_of

_PARAMETERS = {"A_log", "dt_bias"}
_TOLERANCE = 1e-5  # relative to each decay: a few float32 roundings


def channel_gate_of(gate: nn.Module) -> list[nn.Module] | None:
    """Return the linear layers of the module, in the order of their calls, or None if it is not this formula.

    It is called with what a last layer gives, including large and small numbers, and without its layers."""
    layers = [child for child in gate._modules.values() if child is not None]
    parameters = gate._parameters
    if parameters.keys() != _PARAMETERS or not all(hasattr(layer, "out_features") for layer in layers):
        return None
    if not 1 <= len(layers) <= 2 or gate._buffers or hooked(gate, gate._modules):
        return None
    speeds, biases = parameters["A_log"], parameters["dt_bias"]
    if biases.dim() != 1 or biases.numel() != layers[-1].out_features or biases.numel() % speeds.numel():
        return None
    return layers if _is_the_formula(gate, layers) else None


class _Given(nn.Module):
    """A layer of a trial, which notes what it gets."""

    def __init__(self, result: Tensor) -> None:
        super().__init__()
        self.result, self.given = result, []

    def forward(self, x: Tensor) -> Tensor:
        self.given.append(x)
        return self.result


@torch.no_grad()
def _is_the_formula(gate: nn.Module, layers: list[nn.Module]) -> bool:
    generator = torch.Generator("cpu").manual_seed(0)
    x, *results = (
        8 * torch.randn(2, 3, size, generator=generator, dtype=torch.float32, device="cpu")
        for size in (8, *(layer.out_features for layer in layers))
    )
    givens = dict(zip(gate._modules, map(_Given, results), strict=True))
    probe = probe_of(gate, **givens)
    own = probe._parameters
    for name in _PARAMETERS:
        random = torch.randn(own[name].shape, generator=generator, dtype=torch.float32, device="cpu")
        own[name] = nn.Parameter(random)
    try:
        y = probe(x)
    except (TypeError, RuntimeError, ValueError, AttributeError):
        return False
    handed = all(
        len(each.given) == 1 and each.given[0] is of for each, of in zip(givens.values(), [x, *results], strict=False)
    )
    heads = own["A_log"].numel()
    speed = own["A_log"].double().exp().view(heads, 1)
    wanted = -speed * functional.softplus((results[-1].double() + own["dt_bias"]).unflatten(-1, (heads, -1)))
    return (
        handed and y.shape == wanted.shape and bool(((y - wanted).abs() <= _TOLERANCE * (wanted.abs() + speed)).all())
    )
