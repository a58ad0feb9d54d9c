# SPDX-License-Identifier: Apache-2.0
"""Plan: autoquant's choice for each linear layer, with the reason. It prints, plots, is kept as JSON, and is applied
to a model."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections import defaultdict
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from lowbit.autotune.evaluated import Evaluation
from lowbit.autotune.kept_times import machine
from lowbit.autotune.kv_choice import CacheChoice
from lowbit.autotune.picture import picture
from lowbit.autotune.plan_checks import check_fits, check_names_of_formats, check_rows, text_of_size
from lowbit.autotune.plan_row import PlanRow
from lowbit.documents.declared import as_declared
from lowbit.documents.whole_file import write_whole
from lowbit.formats.base import FormatConfig
from lowbit.formats.spec import LinearSpec
from lowbit.quant.quantize import quantize_
from lowbit.quant.report import QuantizationReport
from lowbit.quant.select import select
from lowbit.tables.folding import decibels, spread
from lowbit.tables.layer_table import LayerTable

VERSION = 1
_NO_MODEL = (
    "it is no model: autoquant leaves the model as it is; plan.apply(model) quantizes it in place, and the model is "
    "called as before"
)


@dataclass(repr=False)
class Plan(LayerTable):
    """The formats that `autoquant` chose. Print it, let a notebook show it, `plot`, `save`, and `apply` it.
    ``layers`` has a line for each layer.

    Args:
        rows: one per linear layer, in the order of ``named_modules``.
        min_sqnr: the bound in dB, -inf without one.
        model_db: SQNR of the model's output on the example input, in dB; nan where it is not known.
        float_seconds, seconds: the times of the model on the example input, before and after; nan without one.
        kv_cache: the format of the KV cache that holds the bound, for a decoder that returns one.
        evaluation: the figure of ``evaluate`` without and with the plan.
        machine: the machine that it was measured on.
        notes: further remarks.
    """

    rows: list[PlanRow]
    min_sqnr: float
    model_db: float = math.nan
    float_seconds: float = math.nan
    seconds: float = math.nan
    kv_cache: CacheChoice | None = None
    evaluation: Evaluation | None = None
    machine: dict[str, str] = field(default_factory=machine)
    notes: list[str] = field(default_factory=list)

    COLUMNS = ("layer", "n x k", "calls", "format", "row", "to float", "dB", "MB", "note")

    @property
    def specs(self) -> dict[str, LinearSpec]:
        """The formats of the layers that do not stay float, by name."""
        return {row.layer: row.spec for row in self.rows if row.spec is not None}

    def apply(self, model: nn.Module) -> QuantizationReport:
        """Quantize ``model`` in place as the plan says; each layer prefers its row from then on.

        Every check comes before the first change. On another machine the plan is valid, though perhaps not the fastest:
        a warning says so.

        Raises:
            ValueError: names all layers that the model does not have, or has in another size or already quantized,
                those without a line, and those whose kernel row is not in this build or serves none of their calls; a
                weight that is not finite.
        """
        model = getattr(model, "_orig_mod", model)
        check_rows(self.rows)
        check_fits(self.rows, model)
        configs: dict[LinearSpec, set[str]] = defaultdict(set)
        for name, spec in self.specs.items():
            configs[spec].add(name)
        for spec, names in configs.items():
            select(model, _Fixed(spec), _named(names), None, True)
        here = machine()
        if other := [name for name, value in self.machine.items() if here.get(name) != value]:
            told = ", ".join(f"{name} {self.machine[name]} (here {here.get(name)})" for name in other)
            warnings.warn(f"Plan: times are those of {told}: another choice may be faster here", stacklevel=2)
        reports = [quantize_(model, _Fixed(spec), _named(names), head=None) for spec, names in configs.items()]
        for row in self.rows:
            if row.row:
                model.get_submodule(row.layer).prefer(row.row)
        return _merged(reports)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; a file that is there is replaced as a whole. Raises ValueError as `to_dict`."""
        write_whole(Path(path), json.dumps(self.to_dict(), indent=1))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            ValueError: it is no plan, or of another version; a layer has two lines, a format that is not here or that
                its weight cannot have, or a kernel row that this build does not have.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text()))
        except ValueError as error:
            raise ValueError(f"Plan: {path}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Return numbers, strings, lists and dictionaries; numbers that are not finite are strings, as JSON has none.

        Raises:
            ValueError: a format has a value that is no number and no text, and could not be read again.
        """
        for name, spec in self.specs.items():
            for part in fields(spec):
                value = getattr(spec, part.name)
                if not isinstance(value, (str, int, float, type(None))):
                    raise ValueError(f"Plan: {name} cannot be kept in a file with {part.name}={value!r}")
        return _plain({"lowbit_plan": VERSION, **asdict(self)})

    @classmethod
    def from_dict(cls, values: Any) -> Plan:
        """Return the plan of `to_dict`. Raises ValueError as `load`."""
        if not isinstance(values, dict) or "lowbit_plan" not in values:
            raise ValueError("this is no plan of lowbit.autoquant")
        values = dict(values)
        version = values.pop("lowbit_plan")
        if version != VERSION:
            raise ValueError(f"the version must be {VERSION}, got {version!r}")
        check_names_of_formats(values.get("rows"))
        plan: Plan = as_declared(cls, values, "plan")
        check_rows(plan.rows)
        return plan

    def plot(self) -> Any:
        """Draw with matplotlib the time of each layer before and after and its dB; return the two axes.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return picture(self.rows, self.min_sqnr)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise TypeError: a plan is no model."""
        raise TypeError(f"Plan: a plan cannot be called, {_NO_MODEL}")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"Plan: a plan has no {name!r}, {_NO_MODEL}")

    @staticmethod
    def _alike(row: PlanRow) -> tuple[object, ...]:
        return row.shape, row.calls, row.spec, row.row, row.note

    @staticmethod
    def _cells(rows: list[PlanRow]) -> tuple[str, ...]:
        """The cells of a line of layers that are alike: bytes of all of them, the spread of their times and errors."""
        row = rows[0]
        before, after = (sum(getattr(row, name) for row in rows) for name in ("bytes_before", "bytes_after"))
        return (
            text_of_size(row.shape),
            ", ".join(f"{count} of {m} x {dtype}" for m, dtype, count in row.calls),
            "float" if row.spec is None else row.spec.name,
            row.row,
            spread((row.float_seconds / row.seconds for row in rows if row.seconds), lambda ratio: f"{ratio:.2f}x"),
            decibels(row.error_db for row in rows),
            f"{before / 1e6:.2f} -> {after / 1e6:.2f}" if before else "",
            row.note,
        )

    def _title(self) -> str:
        bound = "no bound" if math.isinf(self.min_sqnr) else f"bound {self.min_sqnr:.1f} dB"
        return f"plan: {len(self.specs)} of {len(self.rows)} linear layers quantized, {bound}"

    def _below(self) -> list[str]:
        before, after = (sum(getattr(row, name) for row in self.rows) for name in ("bytes_before", "bytes_after"))
        lines = [f"weights: {before / 1e6:.1f} -> {after / 1e6:.1f} MB"]
        if not math.isnan(self.seconds):
            ratio = self.float_seconds / self.seconds
            lines.append(f"model: {1e3 * self.float_seconds:.3g} -> {1e3 * self.seconds:.3g} ms, {ratio:.2f}x float")
        if not math.isnan(self.model_db):
            lines.append(f"model output: {'exact' if self.model_db == math.inf else f'{self.model_db:.1f} dB'}")
        if self.evaluation is not None:
            figure = self.evaluation
            lines.append(f"evaluate: {figure.before:.5g} -> {figure.after:.5g}, at most {figure.at_most:.5g}")
        if self.kv_cache is not None:
            errors = ", ".join(f"{name} {value:.1f} dB" for name, value in self.kv_cache.error_db.items())
            hand_over = f'; hand over QuantizedCache("{self.kv_cache.format}")'
            lines.append(f"KV cache: {self.kv_cache.format} ({errors}){hand_over * (self.kv_cache.format != 'float')}")
        return [*lines, *(f"note: {note}" for note in self.notes)]


@dataclass(frozen=True, slots=True)
class _Fixed(FormatConfig):
    """The configuration of one spec."""

    fixed: LinearSpec
    function: ClassVar[str] = "Plan"

    def spec(self, dtype: Any) -> LinearSpec:
        return self.fixed

    def __str__(self) -> str:
        return self.fixed.name


def _named(names: set[str]) -> Any:
    return lambda module, name: name in names


def _merged(reports: list[QuantizationReport]) -> QuantizationReport:
    """One report of several calls, each of which changed other layers."""
    if not reports:
        return QuantizationReport("plan", notes=["the plan leaves every layer as it is"])
    stays = "stays float in the plan"
    rows = {row.layer: replace(row, note=stays) for report in reports for row in report.skipped}
    rows |= {row.layer: row for report in reports for row in report.quantized}
    return QuantizationReport(
        "plan",
        rows=[rows[row.layer] for row in reports[0].rows],
        notes=list(dict.fromkeys(note for report in reports for note in report.notes)),
        model_bytes_before=reports[0].model_bytes_before,
        model_bytes_after=reports[-1].model_bytes_after,
        left=reports[-1].left,
    )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
