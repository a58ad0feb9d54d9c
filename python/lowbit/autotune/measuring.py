# SPDX-License-Identifier: Apache-2.0
"""Seconds of each format and kernel row on the shapes that layers saw, and the options that follow from them.

seconds of an option = sum over shapes of (times seen) * (best seconds of one call).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lowbit.autotune.kept_times import KeptTimes
from lowbit.autotune.options import MeasuredLayer, Option, packed_layer, preferring
from lowbit.autotune.rows import fitting_rows
from lowbit.autotune.seen_layer import SeenLayer, Shape
from lowbit.autotune.timing import AGREE, Timed, Timer, Times
from lowbit.devices import places
from lowbit.formats.spec import LinearSpec
from lowbit.quant.quant_linear import QuantLinear

MARGIN = 0.03
"""The share of time that an option has to win: a format over the float layer, a preferred row over the one that is
first anyway, many formats over one. Best-of-15 of one call twice differ by less on an idle machine."""
NOISY = 1.5
"""Times of the same call that differ by more say nothing: a call is taken to need the time of its weight's bytes."""
TIE = 1.02  # options whose times differ by less are equally fast: the smaller one comes first
Sets = Mapping[Shape, Mapping[str, float]]  # seconds by the names of calls
FLOAT, NOISE = "float", "noise"  # names in a set of times, beside those of formats and rows


class Measuring:
    """Makes the options of layers; a set of calls is timed once for all layers of a kind.

    Args:
        layers: all layers of the model that may change: their bytes lie between two calls of one.
        kinds: those to be measured, as `kinds_of` groups them.
        specs: the formats to try, by the dtype of the weight.
        timer, kept: the timer, and the times that are known already.
        failed: called with a text where a candidate cannot be tried.
    """

    def __init__(
        self,
        layers: Sequence[SeenLayer],
        kinds: Sequence[Sequence[SeenLayer]],
        specs: Mapping[torch.dtype, Sequence[LinearSpec]],
        timer: Timer,
        kept: KeptTimes,
        failed: Callable[[Exception, str], None],
    ) -> None:
        self.layers, self.timer, self.kept, self.failed = layers, timer, kept, failed
        self.specs = {dtype: list(of_dtype) for dtype, of_dtype in specs.items()}
        self._share = 1 / max(1, sum(len(kind[0].calls) for kind in kinds))  # fraction of time per set of calls
        self.noise = 1.0  # the ratio by which times of the same call differ, over all layers by their times
        self._fitting: dict[tuple[object, ...], list[str]] = {}
        self._packed: dict[LinearSpec, QuantLinear] = {}  # the measured layer in each format

    def measure(self, kinds: Iterable[Sequence[SeenLayer]]) -> list[MeasuredLayer]:
        """Return the layers with their options; the first of each kind is measured for all of it."""
        measured = [(kind, *self._measure_kind(kind[0])) for kind in kinds]
        self._packed.clear()
        of_float = [
            (times[FLOAT] * kind[0].calls[shape], times[NOISE])
            for kind, sets, _ in measured
            for shape, times in sets.items()
        ]
        self.noise = sum(seconds * noise for seconds, noise in of_float) / sum(seconds for seconds, _ in of_float)
        return [layer for item in measured for layer in self._with_options(*item)]

    def _measure_kind(self, seen: SeenLayer) -> tuple[Sets, dict[LinearSpec, float]]:
        """Return seconds, and the errors of all formats."""
        self._packed.clear()
        specs = self.specs[seen.module.weight.dtype]  # those that cannot be tried leave it
        sets = {shape: self._seconds(seen, shape, specs) for shape in seen.calls}
        layer = MeasuredLayer(seen)
        return sets, {spec: layer.error_of(self._pack(seen, spec)) for spec in specs}

    def _with_options(
        self, kind: Sequence[SeenLayer], sets: Sets, errors: Mapping[LinearSpec, float]
    ) -> list[MeasuredLayer]:
        """The layers of a kind with the formats that are faster than the float layer by MARGIN; where times differ by
        more, with those that are not slower by more than that. Of options, one that is slower and no more exact than
        another is left out."""
        seen = kind[0]
        total = sum(times[FLOAT] * seen.calls[shape] for shape, times in sets.items())
        as_it_is = Option(None, "", total, seen.module.weight.nbytes)
        found = [self._option(seen, spec, sets) for spec in self.specs[seen.module.weight.dtype]]
        if self.noise > NOISY:
            found = [replace(it, seconds=total * it.bytes / as_it_is.bytes) for it in found]
        limit = total * (self.noise if AGREE < self.noise <= NOISY else 1 - MARGIN)
        formats = {it.spec: it for it in sorted(found, key=_order) if it.seconds <= limit}
        exacter, best = [], -math.inf
        for spec, option in formats.items():
            if errors[spec] > best:  # not nan, an output that is not finite
                exacter.append(option)
                best = errors[spec]
        layers = [MeasuredLayer(layer, [*exacter, as_it_is], formats) for layer in kind]
        layers[0].errors.update(errors)
        return layers

    def _pack(self, seen: SeenLayer, spec: LinearSpec) -> QuantLinear:
        if spec not in self._packed:
            self._packed[spec] = packed_layer(seen, spec)
        return self._packed[spec]

    def _option(self, seen: SeenLayer, spec: LinearSpec, sets: Sets) -> Option:
        """The format with the row that is best on all shapes together; a row serves the shapes that it fits. Another
        row than the first one that fits has to win more than the noise."""
        rows = {shape: self._rows(seen, spec, shape) for shape in sets}

        def total(row: str) -> float:
            served = {shape: row if row in fitting else fitting[0] for shape, fitting in rows.items()}
            return sum(sets[shape][_name(spec, row)] * seen.calls[shape] for shape, row in served.items())

        totals = {row: total(row) for row in ["", *dict.fromkeys(row for fitting in rows.values() for row in fitting)]}
        best = min(totals, key=totals.__getitem__)
        row = best if totals[best] * margin_of(self.noise) < totals[""] else ""
        return Option(spec, row, totals[row], spec.bytes(*seen.features))

    def _rows(self, seen: SeenLayer, spec: LinearSpec, shape: Shape) -> list[str]:
        device = places.type_of_rows(seen.module.weight.device, "linear")
        call = (shape.m, *spec.op_args(*seen.features), shape.dtype, device)
        if call not in self._fitting:
            self._fitting[call] = fitting_rows(*call)
        return self._fitting[call]

    def _seconds(self, seen: SeenLayer, shape: Shape, specs: list[LinearSpec]) -> dict[str, float]:
        """Best seconds of one call: of the float layer, and of each format and row; and their noise."""
        n, k = seen.features
        weight, bias = seen.module.weight, seen.module.bias
        key = self.kept.key(
            layer=f"{type(seen.module).__name__} {n}x{k} {weight.dtype} bias {None if bias is None else bias.dtype}",
            x=shape,
            between=f"{self._bytes_between(seen, None) >> 20} MiB",
        )
        names = [_name(spec, row) for spec in specs for row in self._rows(seen, spec, shape)]
        kept = self.kept.get(key, [FLOAT, NOISE, *names])
        if kept is not None:
            return kept
        times = self._measure(seen, shape, specs)
        seconds = times.seconds | {NOISE: times.noise}
        if times.noise <= AGREE:
            self.kept.put(key, seconds)
        return seconds

    def _measure(self, seen: SeenLayer, shape: Shape, specs: list[LinearSpec]) -> Times[str]:
        sample = torch.cat([rows for rows in seen.sample if rows.dtype == shape.torch_dtype])
        x = sample[torch.arange(shape.m, device=sample.device) % len(sample)]
        calls = {FLOAT: Timed(lambda: seen.module.forward(x), self._bytes_between(seen, None), FLOAT)}
        for spec in list(specs):
            try:
                layer = self._pack(seen, spec)
                layer.forward(x)
            except Exception as error:  # a candidate is the caller's, and may raise anything
                self.failed(error, f"{spec.name} is left out, {seen.name} cannot be tried with it")
                specs.remove(spec)
                continue
            for row in self._rows(seen, spec, shape):
                call = _forward(preferring(seen.module, layer.weight, spec, row), x)
                calls[_name(spec, row)] = Timed(call, self._bytes_between(seen, spec), spec.name, rival=FLOAT)
        return self.timer.best(calls, self._share)

    def _bytes_between(self, seen: SeenLayer, spec: LinearSpec | None) -> int:
        """Bytes of all other layers' weights, were they in this format."""
        return sum(
            layer.module.weight.nbytes if spec is None else spec.bytes(*layer.features)
            for layer in self.layers
            if layer is not seen
        )


def kinds_of(layers: Sequence[SeenLayer]) -> list[list[SeenLayer]]:
    """Group layers of one size, dtype and bias that saw the same shapes as often: their times are the same."""
    kinds: dict[tuple[object, ...], list[SeenLayer]] = {}
    for seen in layers:
        bias = seen.module.bias
        of_bias = None if bias is None else bias.dtype
        key = (type(seen.module), seen.features, seen.module.weight.dtype, of_bias, frozenset(seen.calls.items()))
        kinds.setdefault(key, []).append(seen)
    return list(kinds.values())


def margin_of(noise: float) -> float:
    """The ratio of two times from which on they differ."""
    return max(1 + MARGIN, noise)


def _order(option: Option) -> tuple[object, ...]:
    """The fastest first; of those that are equally fast the smallest, of those one that multiplies integers."""
    float_activations = option.spec is None or option.spec.x_format == "float"
    return round(math.log(option.seconds, TIE)), option.bytes, float_activations, option.seconds


def _name(spec: LinearSpec, row: str) -> str:
    return f"{spec.name} {row}"


def _forward(layer: QuantLinear, x: Tensor) -> Callable[[], Tensor]:
    return lambda: layer.forward(x)
