# SPDX-License-Identifier: Apache-2.0
"""Modules of experts as autoquant records and measures them.

The time of a call depends on how many experts are hit, and how often. A few recorded rows that are repeated would hit
too few of them, so the timed calls have experts drawn uniformly. The error is that of the recorded rows with the
experts and weights that the router gave them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowbit import _C
from lowbit.autotune.seen_layer import SeenLayer, Shape
from lowbit.formats.spec import LinearSpec
from lowbit.quant.experts import Form, call_of, dense_product, parts_in_float64, run
from lowbit.quant.kinds import twin_of
from lowbit.quant.packing import Selected, hold_packed


class SeenExperts(SeenLayer):
    """Modules of experts that share their weights; their inputs are ``hidden_states``, ``top_k_index`` and
    ``top_k_weights``, one row for each token."""

    @property
    def described(self) -> str:
        module, held = self.module, self.module._parameters
        sizes = ", ".join(f"{key} {'x'.join(map(str, held[key].shape))}" for key in self.weights)
        biases = [held[weight.bias].dtype for weight in self.weights.values() if weight.bias]
        implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
        inside = [*module._modules.values()]
        return f"{type(module).__name__} {sizes} {self.dtype} biases {biases} {inside} {implementation}"

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...] | None:
        x, index, weights = (of.detach() for of in call_of(self.module, args, kwargs))
        fits = x.dim() == index.dim() == 2 and len(x) == len(index) and index.shape == weights.shape
        return (x, index, weights) if fits and x.numel() and index.numel() else None

    def arguments(self, shape: Shape) -> tuple[Tensor, ...]:
        x = self.sampled_rows(shape)
        likes = next(of for of in self.sample if of[0].dtype == x.dtype)
        experts = Form.of(self.module).experts
        generator = torch.Generator().manual_seed(0)
        order = torch.rand(shape.m, experts, generator=generator, dtype=torch.float32, device="cpu").argsort(-1)
        index = order[:, torch.arange(shape.picked, device="cpu") % experts]
        weights = likes[2].new_full(index.shape, 1 / shape.picked)
        return x, index.to(likes[1]), weights

    def rows(self, spec: LinearSpec, shape: Shape) -> list[str]:
        return [""]  # a module of experts has no preferred kernel row

    def pack(self, spec: LinearSpec) -> nn.Module:
        packed = {key: self.packed_weight(weight, spec) for key, weight in self.weights.items()}
        return self._with(self.module, packed, spec)

    def in_place_of(self, module: nn.Module, packed: nn.Module, spec: LinearSpec, row: str = "") -> nn.Module:
        return packed if module is self.module else self._with(module, packed._parameters, spec)

    def _with(self, module: nn.Module, packed: Any, spec: LinearSpec) -> nn.Module:
        twin = twin_of(module, type(module))
        for key in self.weights:  # without data: the parameters of the model itself are not replaced
            twin._parameters[key] = nn.Parameter(module._parameters[key].detach().to("meta"), requires_grad=False)
        for key, weight in self.weights.items():
            hold_packed(Selected(self.name, twin, weight, spec, kernel=""), packed[key], _C.LAYOUT)
        return twin

    def exact_output(self, *inputs: Tensor) -> Tensor:
        module, form, weights = self.module, Form.of(self.module), self.weights
        exact = twin_of(module, type(module))
        exact._modules = parts_in_float64(module)
        x, index, router_weights = inputs

        def product(key: str, x: Tensor, index: Tensor, bias: Tensor | None) -> Tensor:
            return dense_product(weights[key], module._parameters[key].detach(), x, index, bias)

        return run(exact, type(module), form, product, x.double(), index, router_weights.double())

    def sampled(self) -> tuple[Tensor, ...]:
        """Return the recorded rows; those of calls with fewer experts for each token name nobody in their place."""
        most, nobody = max(index.shape[1] for _, index, _ in self.sample), Form.of(self.module).experts

        def widened(of: Tensor, value: float) -> Tensor:
            return nn.functional.pad(of, (0, most - of.shape[1]), value=value)

        parts = ((x, widened(index, nobody), widened(weights, 0.0)) for x, index, weights in self.sample)
        return tuple(torch.cat(of) for of in zip(*parts, strict=True))
