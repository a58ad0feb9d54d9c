# SPDX-License-Identifier: Apache-2.0
"""The ways to serve one layer, measured: seconds of each format and row on the shapes that it saw, and its error.

seconds of an option = sum over shapes of (times seen) * (best seconds of one call).
SQNR = 10 log10(sum of y^2 / sum of (y - y')^2) dB, y the layer's output on the recorded inputs in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import _C
from lowbit.autotune.kept_times import KeptTimes
from lowbit.autotune.recording import SeenLayer, Shape
from lowbit.autotune.timing import Timed, Timer
from lowbit.devices import places
from lowbit.formats.spec import LinearSpec
from lowbit.quant.distortion import decibel
from lowbit.quant.linear_layers import features_of, matrix_of
from lowbit.quant.quant_linear import QuantLinear, pack_weight

MARGIN = 0.03
"""What an option has to win over what is there without it: a format over the float layer, a preferred row over the one
that is first anyway. Best-of-15 of one call twice differ by less on an idle machine."""
TIE = 1.02  # options whose times differ by less are equally fast: the smaller one comes first
_CHUNK = 1024  # output features of which the float64 reference is computed at once
FLOAT = "float"


@dataclass(frozen=True, slots=True)
class Option:
    """One way to serve a layer: ``spec`` None is the float layer as it is, ``row`` "" the first row that fits."""

    spec: LinearSpec | None
    row: str
    seconds: float
    bytes: int


@dataclass(eq=False)
class MeasuredLayer:
    """A layer and its options, the fastest first; the float layer is the last."""

    seen: SeenLayer
    options: list[Option]
    _packed: QuantLinear | None = None  # the last one: of all layers these are a model's weights once
    _errors: dict[LinearSpec, float] = field(default_factory=dict)
    _wanted: Tensor | None = None

    @property
    def as_float(self) -> Option:
        return self.options[-1]

    def pack(self, spec: LinearSpec) -> QuantLinear:
        """Return the layer in a format; the float one stays as it is."""
        if self._packed is None or self._packed.spec != spec:
            self._packed = packed_layer(self.seen, spec)
        return self._packed

    def error_db(self, option: Option) -> float:
        """SQNR of the layer's output, in dB; inf for the float layer."""
        if option.spec is None:
            return math.inf
        if option.spec not in self._errors:
            sample = torch.cat(self.seen.sample)
            if self._wanted is None:
                self._wanted = _exact_output(self.seen, sample)
            self._errors[option.spec] = sqnr_db(self._wanted, self.pack(option.spec)(sample))
        return self._errors[option.spec]


def sqnr_db(wanted: Tensor, got: Tensor) -> float:
    """10 log10(sum of wanted^2 / sum of (wanted - got)^2), in float64; inf where they are equal."""
    wanted, got = wanted.double(), got.double()
    noise = float((wanted - got).square().sum())
    return decibel(max(float(wanted.square().sum()), 1e-300), noise)


def packed_layer(seen: SeenLayer, spec: LinearSpec) -> QuantLinear:
    weight = pack_weight(matrix_of(seen.module, seen.module.weight), spec)[0]
    return preferring(seen.module, weight, spec)


def preferring(module: nn.Module, weight: nn.Parameter, spec: LinearSpec, row: str = "") -> QuantLinear:
    """Return the layer of these bytes that stands for ``module``, with its bias, and prefers a row."""
    layer = QuantLinear.from_packed(weight, *features_of(module), spec, module.bias).eval()
    layer.prefer(row)
    return layer


def _exact_output(seen: SeenLayer, sample: Tensor) -> Tensor:
    weight = matrix_of(seen.module, seen.module.weight.detach())
    x = sample.double()
    y = torch.cat([x @ part.double().T for part in weight.split(_CHUNK)], 1)
    return y if seen.module.bias is None else y + seen.module.bias.detach().double()


class Measuring:
    """Makes the options of layers; a set of calls is timed once for all layers of a kind.

    Args:
        layers: all layers of the model that may change: their bytes lie between two calls of one.
        specs: the formats to try, by the dtype of the weight.
        timer, kept: what measures, and what was measured.
        failed: called with a text where a candidate cannot be tried.
    """

    def __init__(
        self,
        layers: Sequence[SeenLayer],
        specs: Mapping[torch.dtype, Sequence[LinearSpec]],
        timer: Timer,
        kept: KeptTimes,
        failed: Callable[[Exception, str], None],
    ) -> None:
        self.layers, self.timer, self.kept, self.failed = layers, timer, kept, failed
        self.specs = {dtype: list(of_dtype) for dtype, of_dtype in specs.items()}
        self._fitting: dict[tuple[object, ...], list[str]] = {}

    def options_of(self, seen: SeenLayer) -> list[Option]:
        """Return the options that are at least MARGIN faster than the float layer, fastest first, and that one."""
        specs = self.specs[seen.module.weight.dtype]  # those that cannot be tried leave it
        seconds = {shape: self._seconds(seen, shape, specs) for shape in seen.calls}
        total = sum(times[FLOAT] * seen.calls[shape] for shape, times in seconds.items())
        as_it_is = Option(None, "", total, seen.module.weight.nbytes)
        options = [self._option(seen, spec, seconds) for spec in specs]
        faster = [option for option in options if option.seconds <= (1 - MARGIN) * total]
        return [*sorted(faster, key=_order), as_it_is]

    def _option(self, seen: SeenLayer, spec: LinearSpec, seconds: Mapping[Shape, Mapping[str, float]]) -> Option:
        """The format with the row that is best on all shapes together; a row serves the shapes that it fits."""
        rows = {shape: self._rows(seen, spec, shape) for shape in seconds}

        def total(row: str) -> float:
            served = {shape: row if row in fitting else fitting[0] for shape, fitting in rows.items()}
            return sum(seconds[shape][_name(spec, row)] * seen.calls[shape] for shape, row in served.items())

        totals = {row: total(row) for row in ["", *dict.fromkeys(row for fitting in rows.values() for row in fitting)]}
        best = min(totals, key=totals.__getitem__)
        row = best if totals[best] < (1 - MARGIN) * totals[""] else ""
        return Option(spec, row, totals[row], spec.bytes(*seen.features))

    def _rows(self, seen: SeenLayer, spec: LinearSpec, shape: Shape) -> list[str]:
        """Rows that can serve the call, the one that is first anyway before the others; without the portable rows,
        which are up to a thousand times slower, where there is another."""
        device = places.type_of_rows(seen.module.weight.device, "linear")
        call = (shape.m, *spec.op_args(*seen.features), shape.dtype, device)
        if call not in self._fitting:
            self._fitting[call] = self._find_rows(call)
        return self._fitting[call]

    @staticmethod
    def _find_rows(call: tuple[Any, ...]) -> list[str]:
        def served_by(number: int) -> str:
            return next((str(row["name"]) for row in _C.explain_linear(*call, row=number) if row["chosen"]), "")

        first = served_by(0)
        others = (str(row["name"]) for row in _C.kernels("linear") if row["available"] and row["backend"] != "scalar")
        return [first, *(row for row in others if row != first and served_by(_C.row_number("linear", row)) == row)]

    def _seconds(self, seen: SeenLayer, shape: Shape, specs: list[LinearSpec]) -> dict[str, float]:
        """Best seconds of one call: of the float layer, and of each format and row."""
        n, k = seen.features
        weight, bias = seen.module.weight, seen.module.bias
        key = self.kept.key(
            layer=f"{type(seen.module).__name__} {n}x{k} {weight.dtype} bias {None if bias is None else bias.dtype}",
            x=shape,
            between=f"{self._bytes_between(seen, None) >> 20} MiB",
        )
        names = [_name(spec, row) for spec in specs for row in self._rows(seen, spec, shape)]
        kept = self.kept.get(key, [FLOAT, *names])
        if kept is None:
            kept = self._measure(seen, shape, specs)
            self.kept.put(key, kept)
        return kept

    def _measure(self, seen: SeenLayer, shape: Shape, specs: list[LinearSpec]) -> dict[str, float]:
        sample = torch.cat([rows for rows in seen.sample if rows.dtype == shape.torch_dtype])
        x = sample[torch.arange(shape.m, device=sample.device) % len(sample)]
        calls = {FLOAT: Timed(lambda: seen.module.forward(x), self._bytes_between(seen, None), FLOAT)}
        for spec in list(specs):
            try:
                layer = packed_layer(seen, spec)
                layer.forward(x)
            except Exception as error:  # a candidate is the caller's, and so is what it raises
                self.failed(error, f"{spec.name} is left out, {seen.name} cannot be tried with it")
                specs.remove(spec)
                continue
            for row in self._rows(seen, spec, shape):
                call = _forward(preferring(seen.module, layer.weight, spec, row), x)
                calls[_name(spec, row)] = Timed(call, self._bytes_between(seen, spec), kind=spec.name)
        return self.timer.best(calls)

    def _bytes_between(self, seen: SeenLayer, spec: LinearSpec | None) -> int:
        """Bytes of all other layers' weights, were they in this format."""
        return sum(
            layer.module.weight.nbytes if spec is None else spec.bytes(*layer.features)
            for layer in self.layers
            if layer is not seen
        )


def _order(option: Option) -> tuple[int, int, float]:
    return round(math.log(option.seconds, TIE)), option.bytes, option.seconds


def _name(spec: LinearSpec, row: str) -> str:
    return f"{spec.name} {row}"


def _forward(layer: QuantLinear, x: Tensor) -> Callable[[], Tensor]:
    return lambda: layer.forward(x)
