# SPDX-License-Identifier: Apache-2.0
"""Plan: autoquant's choice for each layer, with the reason. It can be printed, plotted, saved as JSON, and
applied to a model."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, get_args

from torch import nn

from lowbit.autotune.evaluated import Evaluation
from lowbit.autotune.kept_times import machine
from lowbit.autotune.kv_choice import CacheChoice
from lowbit.autotune.picture import picture
from lowbit.autotune.plan_checks import (
    check_fits,
    check_names_of_formats,
    check_rows,
    text_of_size,
    with_algorithms,
)
from lowbit.autotune.plan_row import PlanRow
from lowbit.autotune.seen_layers import MEASURED
from lowbit.documents.declared import as_declared
from lowbit.documents.whole_file import write_whole
from lowbit.formats.algorithms import Algorithm
from lowbit.formats.base import FormatConfig
from lowbit.formats.spec import LinearSpec
from lowbit.quant.calibration import Calibration, calibration_of
from lowbit.quant.packing import Selected
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
    """The formats and kernel rows that `autoquant` chose for the layers of a model.

    It can be printed or shown in a notebook; `plot`, `save` and `apply` are methods. ``layers`` has one line per layer.

    Args:
        rows: one row per linear layer and module of experts, in the order of ``named_modules``.
        min_sqnr: the bound in dB; -inf if there is none.
        model_db: SQNR of the model's output on the example input, in dB; nan if unknown.
        float_seconds, seconds: time in seconds of the model on the example input before and after; nan if there is no
            example input.
        kv_cache: a format of the KV cache that satisfies the bound, for a decoder that returns a cache.
        evaluation: the result of ``evaluate`` without and with the plan.
        machine: the machine on which the plan was measured.
        notes: further remarks.
        calibrated: whether codes are chosen with a calibration. `calibration` is it; a file does not keep it.

    Example:
        >>> plan = lowbit.Plan.load("plan.json")
        >>> plan.apply(model)
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
    calibrated: bool = False

    COLUMNS = ("layer", "n x k", "calls", "format", "row", "to float", "dB", "MB", "note")

    def __post_init__(self) -> None:
        self.calibration: Calibration | None = None

    @property
    def specs(self) -> dict[str, LinearSpec]:
        """The formats of the layers that do not stay float, by layer name."""
        return {row.layer: row.spec for row in self.rows if row.spec is not None}

    def apply(
        self,
        model: nn.Module,
        *,
        calibration: Calibration | Iterable[Any] | str | None = None,
        tokenizer: Callable[..., Any] | None = None,
    ) -> QuantizationReport:
        """Quantize ``model`` in place according to the plan, and make each layer prefer its kernel row.

        All checks are made before the first change. On another machine, the plan is valid, but perhaps not the fastest;
        a warning says so.

        Args:
            model: a float model with the layers of the plan.
            calibration, tokenizer: as in `quantize_`, for a plan that was made with a calibration. None is that
                calibration itself, which a plan from a file no longer has.

        Returns:
            The report of ``quantize_``.

        Raises:
            ValueError: a layer of the plan is missing in the model, has another size, or is already quantized; a linear
                layer or module of experts of the model is missing in the plan; a kernel row does not exist in this
                build, or can serve none of its layer's calls; a weight is not finite; the plan was made with a
                calibration, and there is none, or the other way around; or the calibration does not cover a layer. The
                message names the layers.
        """
        model = getattr(model, "_orig_mod", model)
        check_rows(self.rows)
        check_fits(self.rows, model)
        given = self.calibration if calibration is None else calibration
        self._check_calibration(given, tokenizer)
        configs: dict[LinearSpec, set[str]] = defaultdict(set)
        for name, spec in self.specs.items():
            configs[spec].add(name)
        selected: list[Selected] = []
        for spec, names in configs.items():
            selected += select(model, _Fixed(spec), _named(names), None, True, kinds=MEASURED)[0]
        weighed = any(item.spec.weighs_inputs for item in selected)
        found = calibration_of(model, given, "the plan", selected, tokenizer) if given is not None and weighed else None
        here = machine()
        if other := [name for name, value in self.machine.items() if here.get(name) != value]:
            told = ", ".join(f"{name} {self.machine[name]} (here {here.get(name)})" for name in other)
            warnings.warn(f"Plan: times are those of {told}: another choice may be faster here", stacklevel=2)
        reports = [
            quantize_(model, _Fixed(spec), _named(names), calibration=found if spec.weighs_inputs else None, head=None)
            for spec, names in configs.items()
        ]
        for row in self.rows:
            if row.row:
                model.get_submodule(row.layer).prefer(row.row)
        return _merged(reports)

    def _check_calibration(self, given: Any, tokenizer: Any) -> None:
        if self.calibrated and given is None:
            raise ValueError(
                "Plan: calibration must be given, since the plan was made with one, and its file does not keep it; got "
                "None"
            )
        if given is not None and not self.calibrated:
            raise ValueError("Plan: calibration must be None for a plan that was made without one")
        if tokenizer is not None and not self.calibrated:
            raise ValueError("Plan: tokenizer must be None for a plan that was made without a calibration")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file. An existing file is replaced atomically.

        Raises:
            ValueError: a value cannot be saved, see `to_dict`.
        """
        write_whole(Path(path), json.dumps(self.to_dict(), indent=1))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            ValueError: the file is not a plan, or has another version; a layer has two rows, an unknown format or one
                that does not fit its weight, or a kernel row that does not exist in this build.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text()))
        except ValueError as error:
            raise ValueError(f"Plan: {path}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as numbers, strings, lists and dictionaries. Numbers that are not finite become strings,
        since JSON does not have them.

        Raises:
            ValueError: a format has a value that is neither a number nor a string, and could not be loaded again.
        """
        for name, spec in self.specs.items():
            for part in fields(spec):
                value = getattr(spec, part.name)
                if not isinstance(value, (str, int, float, NoneType, *get_args(Algorithm))):
                    raise ValueError(
                        f"Plan: {part.name} of {name} must be text, a number or None to be saved, got {value!r}"
                    )
        values = asdict(self)
        for row, saved in zip(self.rows, values["rows"], strict=True):
            if row.spec is not None and row.spec.algorithm is not None:
                saved["spec"]["algorithm"] = str(row.spec.algorithm)
        return _plain({"lowbit_plan": VERSION, **values})

    @classmethod
    def from_dict(cls, values: Any) -> Plan:
        """Return the plan for a result of `to_dict`.

        Raises:
            ValueError: the values are not a plan, see `load`.
        """
        if not isinstance(values, dict) or "lowbit_plan" not in values:
            raise ValueError(f"a plan of lowbit.autoquant must be a dict with lowbit_plan, got {values!r:.80}")
        values = dict(values)
        version = values.pop("lowbit_plan")
        if version != VERSION:
            raise ValueError(f"the version must be {VERSION}, got {version!r}")
        check_names_of_formats(values.get("rows"))
        if "rows" in values:
            values["rows"] = with_algorithms(values["rows"])
        plan: Plan = as_declared(cls, values, "plan")
        check_rows(plan.rows)
        return plan

    def plot(self) -> Any:
        """Plot the time of each layer before and after, and its SQNR, with matplotlib; return both axes.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return picture(self.rows, self.min_sqnr)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise TypeError, since a plan is not a model."""
        raise TypeError(f"Plan: a plan cannot be called, {_NO_MODEL}")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"Plan: a plan has no {name!r}, {_NO_MODEL}")

    @staticmethod
    def _alike(row: PlanRow) -> tuple[object, ...]:
        return row.shape, row.calls, row.spec, row.row, row.note

    @staticmethod
    def _cells(rows: list[PlanRow]) -> tuple[str, ...]:
        """Return the cells of a line for layers of the same kind: their total size, and the range of their times and
        errors."""
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
        return f"plan: {len(self.specs)} of {len(self.rows)} layers quantized, {bound}"

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
    """A configuration with a given spec."""

    fixed: LinearSpec
    function: ClassVar[str] = "Plan"

    def spec(self, dtype: Any) -> LinearSpec:
        return self.fixed

    def __str__(self) -> str:
        return self.fixed.name


def _named(names: set[str]) -> Any:
    return lambda module, name: name in names


def _merged(reports: list[QuantizationReport]) -> QuantizationReport:
    """Merge the reports of several calls of quantize_, each of which changed different layers."""
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
