# SPDX-License-Identifier: Apache-2.0
"""Times of each format and kernel row for the recorded shapes, and the options that result from them.

seconds of an option = sum over shapes of (number of calls) * (best seconds of one call).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from lowbit.autotune.kept_times import KeptTimes
from lowbit.autotune.options import MeasuredLayer, Option
from lowbit.autotune.seen_layer import SeenLayer, Shape
from lowbit.autotune.timing import AGREE, BUSY, Timed, Timer, Times
from lowbit.formats.spec import LinearSpec

MARGIN = 0.03
"""The min fraction of time by which an option must be faster: a format than the float layer, a preferred kernel row
than the default one, several formats than a single one. On an idle machine, two best-of-15 times of the same call
differ by less."""
NOISY = 1.5
"""If times of the same call differ by a larger ratio, they are useless, and times are assumed to be proportional to the
size of the weight."""
TIE = 1.02  # options whose times differ by a smaller ratio count as equally fast, and the smaller one comes first
Sets = Mapping[Shape, Mapping[str, float]]  # seconds by shape and name of the call
FLOAT, NOISE = "float", "noise"  # names in a set of times besides those of formats and rows


class Measuring:
    """Measures the options of layers. A set of calls is timed once for all layers of a kind.

    Args:
        layers: all layers of the model that may change. The weights of the others are read between two calls of one.
        kinds: the layers to measure, grouped by `kinds_of`.
        formats: the formats to try, by the dtype of the weight, each with the one that the output head gets in its
            place.
        timer: the timer.
        kept: the times that are known already.
        failed: called with an exception and a text if a candidate cannot be tried.
    """

    def __init__(
        self,
        layers: Sequence[SeenLayer],
        kinds: Sequence[Sequence[SeenLayer]],
        formats: Mapping[torch.dtype, Mapping[LinearSpec, LinearSpec]],
        timer: Timer,
        kept: KeptTimes,
        failed: Callable[[Exception, str], None],
    ) -> None:
        self.layers, self.timer, self.kept, self.failed = layers, timer, kept, failed
        self.of_head = {spec: of_head for of_dtype in formats.values() for spec, of_head in of_dtype.items()}
        self.specs = {(dtype, False): list(of_dtype) for dtype, of_dtype in formats.items()}
        for dtype, of_dtype in formats.items():
            self.specs[dtype, True] = list(dict.fromkeys(of_dtype.values()))
        self._share = 1 / max(1, sum(len(kind[0].calls) for kind in kinds))  # fraction of the time per set of calls
        self.taken = 0.0  # max share of the CPU time that other programs took
        self.noise = 1.0  # ratio by which times of the same call differ, averaged over layers and weighted by time
        self._fitting: dict[tuple[SeenLayer, LinearSpec, Shape], list[str]] = {}
        self._packed: dict[LinearSpec, nn.Module] = {}  # the measured layer in each format

    def measure(self, kinds: Iterable[Sequence[SeenLayer]]) -> list[MeasuredLayer]:
        """Return the layers with their options. For each kind only the first layer is measured."""
        measured = [(kind, *self._measure_kind(kind[0])) for kind in kinds]
        self._packed.clear()
        of_float = [
            (times[FLOAT] * kind[0].calls[shape], times[NOISE])
            for kind, sets, _ in measured
            for shape, times in sets.items()
        ]
        self.noise = sum(seconds * noise for seconds, noise in of_float) / sum(seconds for seconds, _ in of_float)
        if self.taken > BUSY:
            self.noise = math.inf
        return [layer for item in measured for layer in self._with_options(*item)]

    @property
    def by_bytes(self) -> bool:
        """Whether the times say nothing, so that they are assumed to be proportional to the size of the weight."""
        return self.noise > NOISY

    def _measure_kind(self, seen: SeenLayer) -> tuple[Sets, dict[LinearSpec, float]]:
        """Return the times of a layer, and the errors of all formats."""
        self._packed.clear()
        specs = self._specs(seen)  # formats that cannot be tried are removed from this list
        sets = {shape: self._seconds(seen, shape, specs) for shape in seen.calls}
        layer = MeasuredLayer(seen)
        return sets, {spec: layer.error_of(self._pack(seen, spec)) for spec in specs}

    def _specs(self, seen: SeenLayer) -> list[LinearSpec]:
        return self.specs[seen.dtype, seen.is_head]

    def _with_options(
        self, kind: Sequence[SeenLayer], sets: Sets, errors: Mapping[LinearSpec, float]
    ) -> list[MeasuredLayer]:
        """Return the layers of a kind with their formats and options.

        Formats must be faster than the float layer by MARGIN; if the noise is larger than AGREE, they must not be
        slower by more than the noise. An option that is slower and not more exact than another one is omitted.
        """
        seen = kind[0]
        total = sum(times[FLOAT] * seen.calls[shape] for shape, times in sets.items())
        as_it_is = Option(None, "", total, seen.float_bytes)
        found = [self._option(seen, spec, sets) for spec in self._specs(seen)]
        if self.by_bytes:
            found = [replace(it, seconds=total * it.bytes / as_it_is.bytes) for it in found]
        limit = total * (self.noise if AGREE < self.noise <= NOISY else 1 - MARGIN)
        formats = {it.spec: it for it in sorted(found, key=_order) if it.seconds <= limit}
        exacter, best = [], -math.inf
        for spec, option in formats.items():
            if errors[spec] > best:  # False for nan, which means that the output is not finite
                exacter.append(option)
                best = errors[spec]
        if seen.is_head:  # with all layers in one format, the head has the one that it gets in its place
            formats = {spec: formats[of_head] for spec, of_head in self.of_head.items() if of_head in formats}
        layers = [MeasuredLayer(layer, [*exacter, as_it_is], formats) for layer in kind]
        layers[0].errors.update(errors)
        return layers

    def _pack(self, seen: SeenLayer, spec: LinearSpec) -> nn.Module:
        if spec not in self._packed:
            self._packed[spec] = seen.pack(spec)
        return self._packed[spec]

    def _option(self, seen: SeenLayer, spec: LinearSpec, sets: Sets) -> Option:
        """Return a format with the kernel row that is fastest for all shapes together.

        A row serves the shapes that it can; the default row serves the others. A preferred row must be faster than the
        default rows by more than the noise.
        """
        rows = {shape: self._rows(seen, spec, shape) for shape in sets}

        def total(row: str) -> float:
            served = {shape: row if row in fitting else fitting[0] for shape, fitting in rows.items()}
            return sum(sets[shape][_name(spec, row)] * seen.calls[shape] for shape, row in served.items())

        totals = {row: total(row) for row in ["", *dict.fromkeys(row for fitting in rows.values() for row in fitting)]}
        best = min(totals, key=totals.__getitem__)
        row = best if totals[best] * margin_of(self.noise) < totals[""] else ""
        return Option(spec, row, totals[row], seen.bytes(spec))

    def _rows(self, seen: SeenLayer, spec: LinearSpec, shape: Shape) -> list[str]:
        call = seen, spec, shape
        if call not in self._fitting:
            self._fitting[call] = seen.rows(spec, shape)
        return self._fitting[call]

    def _seconds(self, seen: SeenLayer, shape: Shape, specs: list[LinearSpec]) -> dict[str, float]:
        """Return the best time of a call, for the float layer and for each format and kernel row, and the noise."""
        key = self.kept.key(layer=seen.described, x=shape, between=f"{self._bytes_between(seen, None) >> 20} MiB")
        names = [_name(spec, row) for spec in specs for row in self._rows(seen, spec, shape)]
        kept = self.kept.get(key, [FLOAT, NOISE, *names])
        if kept is not None:
            return kept
        times = self._measure(seen, shape, specs)
        self.taken = max(self.taken, times.taken)
        seconds = times.seconds | {NOISE: times.noise}
        if times.noise <= AGREE and times.taken <= BUSY:
            self.kept.put(key, seconds)
        return seconds

    def _measure(self, seen: SeenLayer, shape: Shape, specs: list[LinearSpec]) -> Times[str]:
        given = seen.arguments(shape)
        calls = {FLOAT: Timed(lambda: seen.module.forward(*given), self._bytes_between(seen, None), FLOAT)}
        for spec in list(specs):
            try:
                layer = self._pack(seen, spec)
                layer.forward(*given)
            except Exception as error:  # candidates are the caller's and may raise anything
                self.failed(error, f"{spec.name} is left out, {seen.name} cannot be tried with it")
                specs.remove(spec)
                continue
            for row in self._rows(seen, spec, shape):
                call = _forward(seen.in_place_of(seen.module, layer, spec, row), given)
                calls[_name(spec, row)] = Timed(call, self._bytes_between(seen, spec), spec.name, rival=FLOAT)
        return self.timer.best(calls, self._share)

    def _bytes_between(self, seen: SeenLayer, spec: LinearSpec | None) -> int:
        """Return the size in bytes that the weights of all other layers have in this format."""
        return sum(
            layer.float_bytes if spec is None else layer.bytes(spec) for layer in self.layers if layer is not seen
        )


def kinds_of(layers: Sequence[SeenLayer]) -> list[list[SeenLayer]]:
    """Group layers with the same description and calls, whose times are therefore the same, and which may have the same
    formats."""
    kinds: dict[tuple[object, ...], list[SeenLayer]] = {}
    for seen in layers:
        kinds.setdefault((seen.described, seen.is_head, frozenset(seen.calls.items())), []).append(seen)
    return list(kinds.values())


def margin_of(noise: float) -> float:
    """Return the min ratio of two times that counts as a difference."""
    return max(1 + MARGIN, noise)


def _order(option: Option) -> tuple[object, ...]:
    """Return the sort key of an option: the fastest first; among equally fast ones the smallest; among equally small
    ones those with integer products."""
    float_activations = option.spec is None or option.spec.x_format == "float"
    return round(math.log(option.seconds, TIE)), option.bytes, float_activations, option.seconds


def _name(spec: LinearSpec, row: str) -> str:
    return f"{spec.name} {row}"


def _forward(layer: nn.Module, given: tuple[Tensor, ...]) -> Callable[[], Tensor]:
    return lambda: layer.forward(*given)
