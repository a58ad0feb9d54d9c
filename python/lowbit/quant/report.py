# SPDX-License-Identifier: Apache-2.0
"""QuantizationReport: the result of quantize_ for every linear layer, as text, HTML and a dictionary."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from lowbit.formats.spec import LinearSpec
from lowbit.quant.distortion import Distortion
from lowbit.quant.linear_layers import features_of
from lowbit.tables.folding import decibels
from lowbit.tables.layer_table import LayerTable


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One linear layer.

    Args:
        layer: qualified name in the model.
        format: short name of the format; empty when the layer was skipped.
        shape: (n, k), the weight's rows and columns.
        bytes_before, bytes_after: of the weight; 0 where another row already counts a shared one.
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
    shape: tuple[int, int]
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
        shape: tuple[int, int],
        bytes_before: int,
        distortion: Distortion,
        kernel: str,
        note: str = "",
    ) -> ReportRow:
        """A layer whose weight was packed as ``spec`` says."""
        absmax_db = math.nan if spec.takes_absmax else distortion.absmax_db
        return cls(layer, spec.name, shape, bytes_before, spec.bytes(*shape), distortion.db, kernel, note, absmax_db)

    def shared(self, layer: str, spec: LinearSpec, kernel: str) -> ReportRow:
        """Another layer that has this one's weight."""
        note = f"shares the weight of {self.layer}"
        return replace(self, layer=layer, format=spec.name, bytes_before=0, bytes_after=0, kernel=kernel, note=note)

    @classmethod
    def skipped(cls, layer: str, module: nn.Module, note: str) -> ReportRow:
        """A layer that stays as it is; one without a weight of its own has no bytes."""
        count = getattr(getattr(module, "weight", None), "nbytes", 0)
        return cls(layer, "", features_of(module), count, count, note=note)


@dataclass(frozen=True, slots=True)
class FloatWeight:
    """A weight of two or more dimensions in no linear layer, which stays float: an embedding, a convolution, experts
    of an MoE.

    Args:
        name: of the parameter.
        kind: class of the module that holds it.
        shape, bytes: as it is.
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
            f"{row.shape[0]}x{row.shape[1]}",
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
