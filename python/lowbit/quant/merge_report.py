# SPDX-License-Identifier: Apache-2.0
"""MergeReport: what became of the changes that adapters made to packed weights, by layer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from lowbit.quant.changed_weight import Change
from lowbit.tables.folding import decibels, first_five, spread
from lowbit.tables.layer_table import LayerTable

ENOUGH = 0.8
"""A layer that keeps less than this share of a change is named in a warning, or takes ``merging(format=...)``."""


@dataclass(frozen=True, slots=True)
class MergeRow:
    """The row of one layer in a `MergeReport`.

    Args:
        layer: qualified name in the model below the adapters; empty for a layer that is merged by itself.
        format: short name of the format.
        shape: (n, k), rows and columns of the weight.
        bytes_before, bytes_after: size of the packed weight in bytes.
        change_db: 10 log10(sum of D^2 / sum of (W + D)^2) for the change D of the weight W. -inf is no change.
        error_db: 10 log10(sum of (W + D)^2 / sum of (P - W - D)^2) for the packed result P. Larger is better.
        kept: sum of (P - W) D / sum of D^2, the share of the change that is kept. 1 is all of it. With a calibration,
            these and the other sums are of products with the inputs of the layer.
        unmoved: the share of the changed rows whose change is too small for any code to move.
        note: a remark, such as another format than before.
    """

    layer: str
    format: str
    shape: tuple[int, ...]
    bytes_before: int
    bytes_after: int
    change_db: float
    error_db: float
    kept: float
    unmoved: float
    note: str = ""

    @classmethod
    def of(
        cls, layer: str, format: str, shape: tuple[int, ...], size: tuple[int, int], change: Change, note: str
    ) -> MergeRow:
        unmoved = change.unmoved / change.rows if change.rows else 0.0
        return cls(layer, format, shape, *size, change.change_db, change.error_db, change.kept, unmoved, note)


@dataclass(repr=False)
class MergeReport(LayerTable):
    """The report of the merges within `lowbit.merging`, which can be printed or shown in a notebook.

    Args:
        rows: one row per merged layer with a packed weight, in the order of merging.
    """

    rows: list[MergeRow] = field(default_factory=list)

    COLUMNS = ("layer", "format", "shape", "change dB", "error dB", "kept", "rows unmoved", "note")

    @property
    def lost(self) -> list[MergeRow]:
        """The rows of layers that keep less than 0.8 of their change."""
        return [row for row in self.rows if row.kept < ENOUGH]

    @property
    def bytes_before(self) -> int:
        return sum(row.bytes_before for row in self.rows)

    @property
    def bytes_after(self) -> int:
        return sum(row.bytes_after for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary of plain numbers, strings, lists and dictionaries."""
        rows = [asdict(row) | {"shape": list(row.shape)} for row in self.rows]
        return {"bytes_before": self.bytes_before, "bytes_after": self.bytes_after, "rows": rows}

    @staticmethod
    def _alike(row: MergeRow) -> tuple[object, ...]:
        return row.format, row.shape, row.note

    @staticmethod
    def _cells(rows: list[MergeRow]) -> tuple[str, ...]:
        row = rows[0]
        return (
            row.format,
            "x".join(map(str, row.shape)),
            _changes(row.change_db for row in rows),
            decibels(row.error_db for row in rows),
            spread((row.kept for row in rows), lambda value: f"{value:.2f}"),
            spread((row.unmoved for row in rows), lambda value: f"{100 * value:.0f} %"),
            row.note,
        )

    def _title(self) -> str:
        return f"{len(self.rows)} layers merged" if self.rows else "no packed layer was merged"

    def _below(self) -> list[str]:
        lines = [f"bytes: {self.bytes_before} -> {self.bytes_after}"] if self.rows else []
        return [*lines, *([f"note: {lost_text(self.lost)}"] if self.lost else [])]


def lost_text(rows: list[MergeRow]) -> str:
    """Return the sentence about layers that lose a part of their change."""
    least = min(row.kept for row in rows)
    layers = first_five([row.layer or "the layer" for row in rows])
    return (
        f"{len(rows)} layers keep less than {ENOUGH:.0%} of their change, the least {least:.0%}, as it is small beside "
        f"a step of their codes: {layers}. The adapter beside the packed layer is exact; lowbit.merging takes a "
        "calibration, or a finer format for these layers"
    )


def _changes(values: Iterable[float]) -> str:
    return spread(values, lambda value: "none" if value == -math.inf else f"{value:.1f}")
