# SPDX-License-Identifier: Apache-2.0
"""Linear layers as autoquant records and measures them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.autotune.rows import fitting_rows
from lowbit.autotune.seen_layer import SeenLayer, Shape
from lowbit.devices import places
from lowbit.formats.spec import LinearSpec
from lowbit.quant.kinds import features_of, matrix_of
from lowbit.quant.quant_linear import QuantLinear

_CHUNK = 1024  # number of output features that are computed at once in float64


class SeenLinear(SeenLayer):
    """Linear layers that share a weight; their input is ``[m, k]``."""

    @property
    def described(self) -> str:
        (n, k), bias = features_of(self.module), self.module.bias
        return f"{type(self.module).__name__} {n}x{k} {self.dtype} bias {None if bias is None else bias.dtype}"

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...] | None:
        x, k = next(iter((*args, *kwargs.values()))), features_of(self.module)[1]
        return (x.detach().reshape(-1, k),) if x.dim() >= 1 and x.shape[-1] == k and x.numel() else None

    def arguments(self, shape: Shape) -> tuple[Tensor, ...]:
        return (self.sampled_rows(shape),)

    def rows(self, spec: LinearSpec, shape: Shape) -> list[str]:
        device = places.type_of_rows(self.module.weight.device, "linear")
        return fitting_rows(shape.m, *spec.op_args(*features_of(self.module)), shape.dtype, device)

    def pack(self, spec: LinearSpec) -> QuantLinear:
        (weight,) = self.weights.values()
        return _preferring(self.module, self.packed_weight(weight, spec), spec)

    def in_place_of(self, module: nn.Module, packed: nn.Module, spec: LinearSpec, row: str = "") -> QuantLinear:
        return _preferring(module, packed.weight, spec, row)

    def exact_output(self, *inputs: Tensor) -> Tensor:
        x, bias = inputs[0].double(), self.module.bias
        y = torch.cat([x @ part.double().T for part in matrix_of(self.module).detach().split(_CHUNK)], 1)
        return y if bias is None else y + bias.detach().double()


def _preferring(module: nn.Module, weight: nn.Parameter, spec: LinearSpec, row: str = "") -> QuantLinear:
    layer = QuantLinear.from_packed(weight, *features_of(module), replace(spec, algorithm=None), module.bias).eval()
    layer.prefer(row)
    return layer
