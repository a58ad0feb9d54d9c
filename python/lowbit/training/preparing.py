# SPDX-License-Identifier: Apache-2.0
"""The common part of training's configurations: checks before anything changes, and the report afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import nn

from lowbit import devices
from lowbit.quant.output_head import INT8
from lowbit.quant.packing import Selected
from lowbit.quant.report import ReportRow, in_model_order

STEPS = ("prepare", "convert")


def check_step(name: str, step: Any) -> None:
    """Raise ValueError unless ``step`` is one of `STEPS`."""
    if step not in STEPS:
        raise ValueError(f"{name}: step must be 'prepare' or 'convert', got step={step!r}")


@dataclass(frozen=True, slots=True)
class TwoStepConfig:
    """Base of the configurations with a ``step``, one of `STEPS`, and nothing else."""

    _: KW_ONLY
    step: str = "prepare"

    def __post_init__(self) -> None:
        check_step(type(self).__name__, self.step)

    def __str__(self) -> str:
        return f"{type(self).__name__}(step={self.step!r})"


def check_no_head(config: Any, head: Any) -> None:
    """Raise ValueError if ``quantize_`` was given a format for the head, where all layers are trained alike."""
    if head not in (None, INT8):
        raise ValueError(f"quantize_: head must be left out with {config}, got {head}: filter_fn can leave it float")


def weight_of(item: Selected) -> str:
    """The weight of a layer, as errors name it."""
    return f"weight of {item.name or 'the model itself'}"


def check_devices(name: str, selected: Iterable[Selected], kernel: str | None = None) -> None:
    """Raise ValueError for a weight where lowbit has no kernels, of every op or of ``kernel``."""
    for item in selected:
        devices.check(name, weight_of(item), item.module.weight.device, kernel=kernel, meta=True)


def in_order(model: nn.Module, rows: dict[str, ReportRow], skipped: Iterable[Any]) -> list[ReportRow]:
    """The rows of layers that changed and of those that stay float, in the order of ``model``."""
    left = (ReportRow.skipped(item.name, item.module, item.reason) for item in skipped)
    return in_model_order(model, [*rows.values(), *left])
