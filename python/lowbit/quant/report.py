# SPDX-License-Identifier: Apache-2.0
"""QuantizationReport: the result of quantize_ for every linear layer, as text, HTML and a dictionary. Errors are
sums of squares and their ratio in dB."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from lowbit.formats.spec import LinearSpec
from lowbit.quant.kinds import LayerWeight, weights_of
from lowbit.tables.folding import decibels
from lowbit.tables.layer_table import LayerTable


def decibel(signal: float, noise: float) -> float:
    """10 log10(signal / noise); inf without noise, -inf without a signal or with infinite noise, nan of nan."""
    if not noise or not signal:
        return -math.inf if noise else math.inf
    return 10 * (math.log10(signal) - math.log10(noise))  # the quotient may be 0


@dataclass(frozen=True, slots=True)
class Distortion:
    """Sums of squares of a weight, of its error, and of the error with the scales of its groups' ranges (absmax).

    Weighed by the inputs of the layer where they are known: by the mean of x^2, or for GPTQ by that of x x^T. nan on
    the meta device.
    """

    signal: float = math.nan
    noise: float = math.nan
    absmax_noise: float = math.nan

    def __add__(self, other: Distortion) -> Distortion:
        """That of two weights together."""
        sums = (self.signal + other.signal, self.noise + other.noise, self.absmax_noise + other.absmax_noise)
        return Distortion(*sums)

    @property
    def db(self) -> float:
        """10 log10(signal / noise); inf is exact."""
        return decibel(self.signal, self.noise)

    @property
    def absmax_db(self) -> float:
        """The same with absmax scales."""
        return decibel(self.signal, self.absmax_noise)


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One linear layer.

    Args:
        layer: qualified name in the model.
        format: short name of the format; empty when the layer was skipped.
        shape: (n, k), the weight's rows and columns; of several matrices their number before.
        bytes_before, bytes_after: the bytes of the weight; 0 where another row already counts a shared one.
        error_db: 10 log10(sum of w^2 / sum of (w - dequantized)^2); larger is better, inf is exact, nan unknown (meta
            device). With a calibration each square counts as much as the mean square of its input; with GPTQ it is that
            of the layer's outputs.
        kernel: the row that will serve it with activations of the weight's dtype; two where one token
            takes another row.
        note: why it was skipped, or another remark.
        absmax_db: the error dB with the scales of the groups' ranges, where others were chosen; else nan.
    """

    layer: str
    format: str
    shape: tuple[int, ...]
    bytes_before: int
    bytes_after: int
    error_db: float = math.nan
    kernel: str = ""
    note: str = ""
    absmax_db: float = math.nan

    @classmethod
    def packed(
        cls,
        layer: str,
        spec: LinearSpec,
        shape: tuple[int, ...],
        bytes_before: int,
        bytes_after: int,
        distortion: Distortion,
        kernel: str,
        note: str = "",
    ) -> ReportRow:
        """A layer whose weight was packed as ``spec`` says."""
        absmax_db = math.nan if spec.takes_absmax else distortion.absmax_db
        return cls(layer, spec.name, shape, bytes_before, bytes_after, distortion.db, kernel, note, absmax_db)

    def shared(self, layer: str, format: str, kernel: str) -> ReportRow:
        """Another layer that has this one's weight."""
        note = f"shares the weight of {self.layer}"
        return replace(self, layer=layer, format=format, bytes_before=0, bytes_after=0, kernel=kernel, note=note)

    @classmethod
    def skipped(cls, layer: str, module: nn.Module, note: str) -> ReportRow:
        """A layer that stays as it is; one without a weight of its own has no bytes."""
        weights = weights_of(module)
        values = (module._parameters.get(weight.key) for weight in weights)
        count = sum(value.nbytes for value in values if value is not None)
        return cls(layer, "", weights[0].shape, count, count, note=note)


@dataclass(frozen=True, slots=True)
class FloatWeight:
    """A weight of two or more dimensions in no linear layer, which stays float: an embedding, a convolution, a router.

    Args:
        name: the name of the parameter.
        kind: class of the module that holds it.
        shape, bytes: its shape and bytes.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(repr=False)
class QuantizationReport(LayerTable):
    """The report of ``quantize_``. Print it, or let a notebook show it: layers of one kind are one line, with the bytes
    of all of them. ``layers`` has a line for each.

    Args:
        config: the configuration, as text.
        rows: one per linear layer, in the order of ``named_modules``.
        notes: about the model as a whole.
        model_bytes_before, model_bytes_after: all parameters and buffers.
        left: weights that are in no linear layer, and stay float.
    """

    config: str
    rows: list[ReportRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    model_bytes_before: int = 0
    model_bytes_after: int = 0
    left: list[FloatWeight] = field(default_factory=list)

    COLUMNS = ("layer", "format", "shape", "before", "after", "error dB", "absmax dB", "kernel", "note")

    @property
    def quantized(self) -> list[ReportRow]:
        return [row for row in self.rows if row.format]

    @property
    def skipped(self) -> list[ReportRow]:
        return [row for row in self.rows if not row.format]

    @property
    def bytes_before(self) -> int:
        return sum(row.bytes_before for row in self.quantized)

    @property
    def bytes_after(self) -> int:
        return sum(row.bytes_after for row in self.quantized)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings, lists and dictionaries."""
        return {
            "config": self.config,
            "quantized": len(self.quantized),
            "skipped": len(self.skipped),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "model_bytes_before": self.model_bytes_before,
            "model_bytes_after": self.model_bytes_after,
            "notes": list(self.notes),
            "left": [asdict(weight) | {"shape": list(weight.shape)} for weight in self.left],
            "rows": [asdict(row) | {"shape": list(row.shape)} for row in self.rows],
        }

    @staticmethod
    def _alike(row: ReportRow) -> tuple[object, ...]:
        return row.format, row.shape, row.kernel, row.note

    @staticmethod
    def _cells(rows: list[ReportRow]) -> tuple[str, ...]:
        """The cells of a line of layers that are alike: bytes of all of them, the spread of their errors."""
        row = rows[0]
        return (
            row.format or "skipped",
            "x".join(map(str, row.shape)),
            _size(sum(row.bytes_before for row in rows)),
            _size(sum(row.bytes_after for row in rows)),
            decibels(row.error_db for row in rows),
            decibels(row.absmax_db for row in rows),
            row.kernel,
            row.note,
        )

    def _title(self) -> str:
        if not self.quantized:
            return f"{self.config}: no layer was quantized, {len(self.skipped)} skipped"
        return f"{self.config}: {len(self.quantized)} quantized, {len(self.skipped)} skipped"

    def _totals(self) -> list[str]:
        lines = []
        if self.quantized:
            lines.append(f"quantized weights: {_change(self.bytes_before, self.bytes_after)}")
        return [*lines, f"whole model: {_change(self.model_bytes_before, self.model_bytes_after)}"]

    def _below(self) -> list[str]:
        return [*self._totals(), *self._left(), *(f"note: {note}" for note in self.notes)]

    def _left(self) -> list[str]:
        """One line per kind of module that keeps float weights, the largest first."""
        kinds: dict[str, list[FloatWeight]] = {}
        for weight in self.left:
            kinds.setdefault(weight.kind, []).append(weight)
        lines = []
        for kind, weights in sorted(kinds.items(), key=lambda item: -sum(weight.bytes for weight in item[1])):
            told = ", ".join(f"{weight.name} {list(weight.shape)}" for weight in weights[:2])
            more = f" and {len(weights) - 2} more" if len(weights) > 2 else ""
            size = _size(sum(weight.bytes for weight in weights))
            lines.append(f"stays float: {size} in {kind}, no linear layer: {told}{more}")
        return lines


def row_name(name: str, module: nn.Module, weight: LayerWeight) -> str:
    """Return the name of a weight's line: that of the layer, or of the parameter where the layer has several."""
    return name if len(weights_of(module)) == 1 else f"{name}.{weight.key}"


def in_model_order(model: nn.Module, rows: Iterable[ReportRow]) -> list[ReportRow]:
    """Sort lines by the places of their layers in ``named_modules``, and of their weights in these."""
    place: dict[str, tuple[int, int]] = {}
    for number, (name, module) in enumerate(model.named_modules()):
        place[name] = number, 0
        place |= {f"{name}.{weight.key}": (number, i) for i, weight in enumerate(weights_of(module))}
    return sorted(rows, key=lambda row: place[row.layer])


def model_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, a shared one once."""
    return sum(tensor.nbytes for group in (model.parameters(), model.buffers()) for tensor in group)


def _change(before: int, after: int) -> str:
    percent = f" ({100 * (after - before) / before:+.0f} %)" if before else ""
    return f"{_size(before)} -> {_size(after)}{percent}"


def _size(count: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count} B"
