# SPDX-License-Identifier: Apache-2.0
"""What the configurations of training share: checks before anything changes, and the report afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import nn

from lowbit import devices
from lowbit.quant.kinds import is_packed, kind_of
from lowbit.quant.output_head import INT8
from lowbit.quant.packing import Selected
from lowbit.quant.quant_experts import EXPERTS
from lowbit.quant.report import ReportRow, in_model_order

STEPS = ("prepare", "convert")


def check_step(name: str, step: Any) -> None:
    """Raise ValueError unless ``step`` is one of `STEPS`."""
    if step not in STEPS:
        raise ValueError(f"{name}: step must be 'prepare' or 'convert', got step={step!r}")


@dataclass(frozen=True, slots=True)
class TwoStepConfig:
    """Base class of the configurations whose only option is ``step``, one of `STEPS`."""

    _: KW_ONLY
    step: str = "prepare"

    def __post_init__(self) -> None:
        check_step(type(self).__name__, self.step)

    def __str__(self) -> str:
        return f"{type(self).__name__}(step={self.step!r})"


def check_no_head(config: Any, head: Any) -> None:
    """Raise ValueError if ``quantize_`` was called with a format for the head, which this configuration does not
    support."""
    if head not in (None, INT8):
        raise ValueError(f"quantize_: head must be left out with {config}, got {head}: filter_fn can leave it float")


def weight_of(item: Selected) -> str:
    """Return the name of a layer's weight for error messages."""
    return f"{item.weight.key} of {item.name or 'the model itself'}"


def check_devices(name: str, selected: Iterable[Selected], kernel: str | None = None) -> None:
    """Raise ValueError if a weight is on a device for which lowbit has no kernels, or none of the op ``kernel``."""
    for item in selected:
        devices.check(name, weight_of(item), item.value.device, kernel=kernel, meta=True)


def notes_of_float_experts(model: nn.Module, what: str) -> list[str]:
    """Return a note if the model has experts that stay float, because ``what`` is for linear layers alone."""
    count = sum(kind_of(module) is EXPERTS and not is_packed(module) for module in model.modules())
    return [f"experts of {count} layers stay float: {what} is for linear layers"] if count else []


def in_order(model: nn.Module, rows: dict[str, ReportRow], skipped: Iterable[Any]) -> list[ReportRow]:
    """Return the report rows of changed and skipped layers, in the order of ``model``."""
    left = (ReportRow.skipped(item.name, item.module, item.reason) for item in skipped)
    return in_model_order(model, [*rows.values(), *left])
