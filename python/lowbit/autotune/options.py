# SPDX-License-Identifier: Apache-2.0
"""The ways to serve one layer, and the error of each.

SQNR = 10 log10(sum of y^2 / sum of (y - y')^2) dB, y the layer's output on the recorded inputs in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lowbit.autotune.seen_layer import SeenLayer
from lowbit.formats.spec import LinearSpec
from lowbit.quant.kinds import features_of, matrix_of
from lowbit.quant.packing import pack_weight
from lowbit.quant.quant_linear import QuantLinear
from lowbit.quant.report import decibel

_CHUNK = 1024  # output features of which the float64 reference is computed at once


@dataclass(frozen=True, slots=True)
class Option:
    """One way to serve a layer: ``spec`` None is the float layer as it is, ``row`` "" the first row that fits."""

    spec: LinearSpec | None
    row: str
    seconds: float
    bytes: int


@dataclass(eq=False)
class MeasuredLayer:
    """A layer and its options.

    Args:
        seen: the layer.
        options: the fastest first, and behind each those that are slower and more exact; the float layer is the last.
        formats: all options that are faster than the float layer, by format, the fastest first.
        errors: the SQNR of the layer's output by format, in dB, where it was asked for.
    """

    seen: SeenLayer
    options: list[Option] = field(default_factory=list)
    formats: dict[LinearSpec, Option] = field(default_factory=dict)
    errors: dict[LinearSpec, float] = field(default_factory=dict)
    _packed: QuantLinear | None = None  # the last one: of all layers these are a model's weights once
    _wanted: Tensor | None = None

    @property
    def as_float(self) -> Option:
        return self.options[-1]

    def in_format(self, spec: LinearSpec) -> Option:
        """The layer in a format, where that is faster than the float layer, else the float layer."""
        return self.formats.get(spec, self.as_float)

    def pack(self, spec: LinearSpec) -> QuantLinear:
        """Return the layer in a format; the float one stays as it is."""
        if self._packed is None or self._packed.spec != spec:
            self._packed = packed_layer(self.seen, spec)
        return self._packed

    def error_db(self, option: Option) -> float:
        """SQNR of the layer's output, in dB; inf for the float layer."""
        if option.spec is None:
            return math.inf
        if option.spec not in self.errors:
            self.errors[option.spec] = self.error_of(self.pack(option.spec))
        return self.errors[option.spec]

    def error_of(self, packed: QuantLinear) -> float:
        """SQNR of the output of the layer in a format, in dB, on the recorded inputs."""
        sample = torch.cat(self.seen.sample)
        if self._wanted is None:
            self._wanted = _exact_output(self.seen, sample)
        return sqnr_db(self._wanted, packed(sample))


def sqnr_db(wanted: Tensor, got: Tensor) -> float:
    """10 log10(sum of wanted^2 / sum of (wanted - got)^2), in float64; inf where they are equal."""
    wanted, got = wanted.double(), got.double()
    noise = float((wanted - got).square().sum())
    return decibel(max(float(wanted.square().sum()), 1e-300), noise)


def packed_layer(seen: SeenLayer, spec: LinearSpec) -> QuantLinear:
    weight = pack_weight(matrix_of(seen.module), spec)[0]
    return preferring(seen.module, weight, spec)


def preferring(module: nn.Module, weight: nn.Parameter, spec: LinearSpec, row: str = "") -> QuantLinear:
    """Return the layer of these bytes that stands for ``module``, with its bias, and prefers a row."""
    layer = QuantLinear.from_packed(weight, *features_of(module), spec, module.bias).eval()
    layer.prefer(row)
    return layer


def _exact_output(seen: SeenLayer, sample: Tensor) -> Tensor:
    weight = matrix_of(seen.module).detach()
    x = sample.double()
    y = torch.cat([x @ part.double().T for part in weight.split(_CHUNK)], 1)
    return y if seen.module.bias is None else y + seen.module.bias.detach().double()
