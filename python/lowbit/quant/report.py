# SPDX-License-Identifier: Apache-2.0
"""QuantizationReport: the result of quantize_ for every layer, as text, HTML and a dictionary. Errors are ratios of
sums of squares, in dB."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from lowbit.formats.spec import LinearSpec
from lowbit.quant.kinds import LayerWeight, weights_of
from lowbit.quant.report_picture import picture
from lowbit.tables.folding import decibels
from lowbit.tables.layer_table import LayerTable


def decibel(signal: float, noise: float) -> float:
    """Return 10 log10(signal / noise): inf without noise, -inf without signal or with infinite noise, nan for nan."""
    if not noise or not signal:
        return -math.inf if noise else math.inf
    return 10 * (math.log10(signal) - math.log10(noise))  # signal / noise may underflow to 0


@dataclass(frozen=True, slots=True)
class Distortion:
    """Sums of squares of a weight, of its error, and of the error that absmax scales would cause.

    If the inputs of the layer are known, the sums are weighted by the mean of x^2, or for GPTQ by that of x x^T. On the
    meta device they are nan.
    """

    signal: float = math.nan
    noise: float = math.nan
    absmax_noise: float = math.nan

    def __add__(self, other: Distortion) -> Distortion:
        """Return the distortion of two weights together."""
        sums = (self.signal + other.signal, self.noise + other.noise, self.absmax_noise + other.absmax_noise)
        return Distortion(*sums)

    @property
    def db(self) -> float:
        """10 log10(signal / noise); inf if there is no error."""
        return decibel(self.signal, self.noise)

    @property
    def absmax_db(self) -> float:
        """The value of ``db`` with absmax scales."""
        return decibel(self.signal, self.absmax_noise)


@dataclass(frozen=True, slots=True)
class ReportRow:
    """The row of one layer in a report.

    Args:
        layer: qualified name in the model.
        format: short name of the format; empty if the layer was skipped.
        shape: (n, k), rows and columns of the weight; (experts, n, k) for several matrices.
        bytes_before, bytes_after: size of the weight in bytes; 0 if the weight is shared, and another row counts it.
        error_db: 10 log10(sum of w^2 / sum of (w - dequantized)^2). Larger is better; inf is exact; nan is unknown
            (meta device). With a calibration, each square is weighted by the mean square of its input; with GPTQ, it is
            the error of the layer's outputs.
        kernel: the kernel row for activations with the weight's dtype; two names if one token is served by another row
            than many.
        note: the reason why the layer was skipped, or another remark.
        absmax_db: the error in dB that absmax scales would cause, if the scales or codes were chosen otherwise; or nan.
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
        """Return the row of a layer whose weight was packed with ``spec``."""
        absmax_db = math.nan if spec.takes_absmax else distortion.absmax_db
        return cls(layer, spec.name, shape, bytes_before, bytes_after, distortion.db, kernel, note, absmax_db)

    def shared(self, layer: str, format: str, kernel: str) -> ReportRow:
        """Return the row of another layer that shares this layer's weight."""
        note = f"shares the weight of {self.layer}"
        return replace(self, layer=layer, format=format, bytes_before=0, bytes_after=0, kernel=kernel, note=note)

    @classmethod
    def skipped(cls, layer: str, module: nn.Module, note: str) -> ReportRow:
        """Return the row of a layer that was not changed. If it has no weight of its own, it has 0 bytes."""
        weights = weights_of(module)
        values = (module._parameters.get(weight.key) for weight in weights)
        count = sum(value.nbytes for value in values if value is not None)
        return cls(layer, "", weights[0].shape, count, count, note=note)


@dataclass(frozen=True, slots=True)
class FloatWeight:
    """A weight with at least two dimensions that stays float: an embedding, a convolution, a router.

    Args:
        name: qualified name of the parameter.
        kind: class name of its module.
        shape: shape of the weight.
        bytes: size of the weight in bytes.
        packable: whether ``quantize_`` packs it if ``filter_fn`` selects its module, an embedding.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    bytes: int
    packable: bool = False


@dataclass(repr=False)
class QuantizationReport(LayerTable):
    """The report of ``quantize_``, which can be printed or shown in a notebook.

    Layers of the same kind are one line, with their total size. ``layers`` has one line per layer.

    Args:
        config: the configuration, as text.
        rows: one row per layer, in the order of ``named_modules``.
        notes: remarks about the whole model.
        model_bytes_before, model_bytes_after: size of all parameters and buffers in bytes.
        left: other weights that stay float, such as embeddings.
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
        """Return the report as a dictionary of plain numbers, strings, lists and dictionaries."""
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

    def plot(self) -> Any:
        """Draw with matplotlib the bytes of each layer before and after, and its error; return the two axes.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return picture(self.rows, self.config)

    @staticmethod
    def _alike(row: ReportRow) -> tuple[object, ...]:
        return row.format, row.shape, row.kernel, row.note

    @staticmethod
    def _cells(rows: list[ReportRow]) -> tuple[str, ...]:
        """Return the cells of a line for layers of the same kind: their total size, and the range of their errors."""
        row = rows[0]
        return (
            row.format or "skipped",
            "x".join(map(str, row.shape)),
            bytes_as_text(sum(row.bytes_before for row in rows)),
            bytes_as_text(sum(row.bytes_after for row in rows)),
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
        return [*self._totals(), *self._left(), *(f"note: {note}" for note in [*self.notes, *self._of_embeddings()])]

    def _of_embeddings(self) -> list[str]:
        """Return how to pack embeddings, if these are half of the model or more."""
        size = sum(weight.bytes for weight in self.left if weight.packable)
        if 2 * size < self.model_bytes_after or not size:
            return []
        share = round(100 * size / self.model_bytes_after)
        return [
            f"float embeddings are {share} % of the model; quantize_(model, lowbit.int8_weight_only(), lambda module, "
            "name: isinstance(module, torch.nn.Embedding)) packs them, and so does LowbitConfig(..., embeddings=...)"
        ]

    def _left(self) -> list[str]:
        """Return one line per class of module that keeps float weights, the largest first."""
        kinds: dict[str, list[FloatWeight]] = {}
        for weight in self.left:
            kinds.setdefault(weight.kind, []).append(weight)
        lines = []
        for kind, weights in sorted(kinds.items(), key=lambda item: -sum(weight.bytes for weight in item[1])):
            told = ", ".join(f"{weight.name} {list(weight.shape)}" for weight in weights[:2])
            more = f" and {len(weights) - 2} more" if len(weights) > 2 else ""
            size = bytes_as_text(sum(weight.bytes for weight in weights))
            lines.append(f"stays float: {size} in {kind}, no linear layer: {told}{more}")
        return lines


def row_name(name: str, module: nn.Module, weight: LayerWeight) -> str:
    """Return the name of a weight's row: that of the layer, or of the parameter if the layer has several weights."""
    return name if len(weights_of(module)) == 1 else f"{name}.{weight.key}"


def in_model_order(model: nn.Module, rows: Iterable[ReportRow]) -> list[ReportRow]:
    """Sort rows by the order of their layers in ``named_modules``, and of the weights within a layer."""
    order: dict[str, tuple[int, int]] = {}
    for number, (name, module) in enumerate(model.named_modules()):
        order[name] = number, 0
        order |= {f"{name}.{weight.key}": (number, i) for i, weight in enumerate(weights_of(module))}
    return sorted(rows, key=lambda row: order[row.layer])


def model_bytes(model: nn.Module) -> int:
    """Return the size of all parameters and buffers in bytes, counting shared ones once."""
    return sum(tensor.nbytes for group in (model.parameters(), model.buffers()) for tensor in group)


def _change(before: int, after: int) -> str:
    percent = f" ({100 * (after - before) / before:+.0f} %)" if before else ""
    return f"{bytes_as_text(before)} -> {bytes_as_text(after)}{percent}"


def bytes_as_text(count: int) -> str:
    """Return a number of bytes in the unit that fits, such as ``"4.10 kB"``."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count} B"
