# SPDX-License-Identifier: Apache-2.0
"""Plans from JSON files: an object of layer names and configurations, or a saved Plan of `lowbit.autoquant`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from torch import nn

from lowbit import _C
from lowbit.formats.nearest import nearest
from lowbit.formats.text import config_of
from lowbit.huggingface.lowbit_config import STORED
from lowbit.quant.kinds import kind_of
from lowbit.quant.quant_linear import LINEAR


def read_plan(path: Path, calibration: Any) -> tuple[dict[str, Any], bool]:
    """Return the configurations of a plan by layer (None leaves it float), and whether it is a saved Plan, which lists
    every linear layer.

    Raises:
        ValueError: the file is no plan, a layer stands twice, a configuration or a kernel row is unknown, or the plan
            was made with a calibration and there is none. The message names the file and the layer.
    """
    begin = f"quantize_checkpoint: plan {path}"
    try:
        told = json.loads(path.read_text(), object_pairs_hook=_Pairs)
    except json.JSONDecodeError as error:
        raise ValueError(f"{begin} must be JSON: {error}") from None
    if not isinstance(told, _Pairs):
        raise ValueError(f"{begin} must be a JSON object of layer names and configurations, got {type(told).__name__}")
    is_saved = "lowbit_plan" in told
    if is_saved and told.get("calibrated") and calibration is None:
        raise ValueError(f"{begin} was made with a calibration and needs calibration, got None")
    layers = _of_autoquant(told.get("rows"), begin) if is_saved else told.pairs
    if twice := [name for name, count in Counter(name for name, _ in layers).items() if count > 1]:
        raise ValueError(f"{begin} must name a layer once, got several of {', '.join(twice)}")
    return {name: _format(config, f"{begin}: {name}") for name, config in layers}, is_saved


class _Pairs(dict):  # type: ignore[type-arg]
    """An object of a JSON file that also has the names that stand twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.pairs = pairs


def _format(config: Any, begin: str) -> Any:
    if config is None or config == STORED:
        return config
    try:
        return config_of(config)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{begin}: {error}") from None


def _of_autoquant(rows: Any, begin: str) -> list[tuple[str, Any]]:
    """Return the layers of a saved plan with their formats."""
    wanted = f"{begin} must have a list of rows, each with layer and spec"
    if not isinstance(rows, list):
        raise ValueError(f"{wanted}, got rows={rows!r}")
    known = [str(found["name"]) for found in _C.kernels("linear")]
    for number, row in enumerate(rows):
        spec = row.get("spec", "") if isinstance(row, dict) else ""
        if not isinstance(spec, (dict, type(None))) or not isinstance(row.get("layer"), str):
            raise ValueError(f"{wanted}, got {row!r} in place {number}")
        if (name := row.get("row", "")) and name not in known:
            near = nearest(str(name), known)
            raise ValueError(
                f"{begin}: {row['layer']}: row must be one that lowbit.kernels() lists, got {name!r}{near}"
            )
    return [(row["layer"], row["spec"]) for row in rows]


def check_is_whole(path: Path, plan: dict[str, Any], model: nn.Module) -> None:
    """Raise ValueError if a saved Plan has no row for a linear layer of the model, which names the layers."""
    linear = (name for name, module in model.named_modules() if kind_of(module) is LINEAR)
    if gone := [name for name in linear if name not in plan]:
        raise ValueError(
            f"quantize_checkpoint: plan {path} must have a row for each linear layer where there is no config, got "
            "none "
            f"for {', '.join(gone)}"
        )
