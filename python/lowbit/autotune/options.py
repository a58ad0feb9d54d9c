# SPDX-License-Identifier: Apache-2.0
"""The options for a layer, and the error of each.

SQNR = 10 log10(sum of y^2 / sum of (y - y')^2) dB, where y is the layer's output on the recorded inputs in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor, nn

from lowbit.autotune.seen_layer import SeenLayer
from lowbit.formats.spec import LinearSpec
from lowbit.quant.report import decibel


@dataclass(frozen=True, slots=True)
class Option:
    """One option for a layer. If ``spec`` is None it is the float layer; an empty ``row`` is the default kernel row."""

    spec: LinearSpec | None
    row: str
    seconds: float
    bytes: int


@dataclass(eq=False)
class MeasuredLayer:
    """A layer and its options.

    Args:
        seen: the layer.
        options: the options from the fastest to the most exact one, which is the float layer.
        formats: all options that are faster than the float layer, by format, the fastest first. The output head may
            have another format in place of one (``Option.spec``).
        errors: the SQNR of the layer's output in dB, for the formats for which it was computed.
    """

    seen: SeenLayer
    options: list[Option] = field(default_factory=list)
    formats: dict[LinearSpec, Option] = field(default_factory=dict)
    errors: dict[LinearSpec, float] = field(default_factory=dict)
    _packed: tuple[LinearSpec, nn.Module] | None = None  # only the last format: all layers have one copy together
    _wanted: Tensor | None = None

    @property
    def as_float(self) -> Option:
        return self.options[-1]

    def in_format(self, spec: LinearSpec) -> Option:
        """Return the option with a format if it is faster than the float layer, otherwise the float layer."""
        return self.formats.get(spec, self.as_float)

    def pack(self, spec: LinearSpec) -> nn.Module:
        """Return a packed copy of the layer. The float layer does not change."""
        if self._packed is None or self._packed[0] != spec:
            self._packed = spec, self.seen.pack(spec)
        return self._packed[1]

    def error_db(self, option: Option) -> float:
        """Return the SQNR of the layer's output in dB; inf for the float layer."""
        if option.spec is None:
            return math.inf
        if option.spec not in self.errors:
            self.errors[option.spec] = self.error_of(self.pack(option.spec))
        return self.errors[option.spec]

    def error_of(self, packed: nn.Module) -> float:
        """Return the SQNR of a packed layer's output on the recorded inputs, in dB."""
        inputs = self.seen.sampled()
        if self._wanted is None:
            self._wanted = self.seen.exact_output(*inputs)
        return sqnr_db(self._wanted, packed(*inputs))


def sqnr_db(wanted: Tensor, got: Tensor) -> float:
    """Return 10 log10(sum of wanted^2 / sum of (wanted - got)^2), computed in float64; inf if they are equal."""
    wanted, got = wanted.double(), got.double()
    noise = float((wanted - got).square().sum())
    return decibel(max(float(wanted.square().sum()), 1e-300), noise)
