# SPDX-License-Identifier: Apache-2.0
"""Checks of a plan that was read from a file, and before it changes a model: a plan may have been edited, or made of
another model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from difflib import get_close_matches
from typing import Any

from torch import nn

from lowbit import _C
from lowbit.autotune.plan_row import PlanRow
from lowbit.autotune.rows import serves
from lowbit.devices import places
from lowbit.quant.kinds import features_of, is_packed, kind_of
from lowbit.quant.quant_linear import LINEAR

_KNOWN = {
    "format": _C.FORMATS, "x_format": _C.X_FORMATS, "mapping": _C.MAPPINGS, "scale": _C.SCALE_CHOICES,
}  # fmt: skip
"""The names of a spec that a file may give."""


def check_names_of_formats(rows: Any) -> None:
    """Raise ValueError for a format that is not here; values of a wrong type are left to `as_declared`."""
    for row in rows if isinstance(rows, list) else ():
        spec = row.get("spec") if isinstance(row, dict) else None
        for name, known in _KNOWN.items() if isinstance(spec, dict) else ():
            if isinstance(value := spec.get(name), str) and value not in known:
                raise ValueError(f"{row.get('layer')} has a format that is not here: {spec}")


def check_rows(rows: Sequence[PlanRow]) -> None:
    """Raise ValueError, with the layer, for a layer with two lines, a format that its weight cannot have, and a kernel
    row that this build does not have."""
    if twice := [name for name, count in Counter(row.layer for row in rows).items() if count > 1]:
        raise ValueError(f"a layer must have one line, got several for {', '.join(twice)}")
    known = [str(found["name"]) for found in _C.kernels("linear")]
    for row in rows:
        try:
            if row.spec is not None:
                row.spec.shape(*row.shape)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{row.layer}: {error}") from None
        if row.row and row.row not in known:
            nearest = ", ".join(get_close_matches(row.row, known)) or known[0]
            raise ValueError(f"{row.layer}: row must be one of linear here, such as {nearest}, got {row.row!r}")


def check_fits(rows: Sequence[PlanRow], model: nn.Module) -> None:
    """Raise ValueError with all layers that the model does not have, or has in another size or already quantized, with
    those that have no line, and those whose kernel row serves none of their calls."""
    modules, named = dict(model.named_modules()), {row.layer for row in rows}
    here = {str(found["name"]) for found in _C.kernels("linear") if found["available"]}
    wrong = [f"{row.layer} ({reason})" for row in rows if (reason := _misfit(row, modules.get(row.layer), here))]
    wrong += [
        f"{name} (no line in the plan)"
        for name, module in modules.items()
        if name not in named and kind_of(module) is LINEAR and not is_packed(module)
    ]
    if wrong:
        raise ValueError(f"Plan: model must have the layers of the plan, got {', '.join(wrong)}")


def _misfit(row: PlanRow, module: nn.Module | None, here: Container[str]) -> str:
    """Why a layer cannot be as its line says; empty: it can. ``here``: the kernel rows that this machine can run."""
    if row.spec is None:
        return ""
    if module is None or kind_of(module) is not LINEAR:
        return "no linear layer" if module is not None else "not there"
    if is_packed(module):
        return f"already quantized as {module.spec.name}"
    if features_of(module) != row.shape:
        return f"{text_of_size(features_of(module))}, wanted {text_of_size(row.shape)}"
    # A row that wants another machine is no fault: a plan is valid on all of them, and the first that fits serves.
    return _unserved(row, module) if row.row in here and row.calls else ""


def _unserved(row: PlanRow, module: nn.Module) -> str:
    """Why the kernel row of a line can serve none of its calls; empty: it can."""
    device = places.type_of_rows(next(module.parameters()).device, "linear")
    numbers = row.spec.op_args(*row.shape)
    if any(serves(row.row, m, *numbers, dtype, device) for m, dtype, _ in row.calls):
        return ""
    return f"{row.row} serves no {row.spec.name} of its calls"


def text_of_size(shape: tuple[int, ...]) -> str:
    """Return "rows x columns"."""
    return " x ".join(map(str, shape))
