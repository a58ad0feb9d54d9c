# SPDX-License-Identifier: Apache-2.0
"""Checks of a plan that is loaded from a file or applied to a model, since it may have been edited, or belong to
another model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn

from lowbit import _C
from lowbit.autotune.plan_row import PlanRow
from lowbit.autotune.rows import alike, serves
from lowbit.autotune.seen_layers import MEASURED
from lowbit.devices import places
from lowbit.formats.nearest import nearest
from lowbit.formats.text import algorithm_from
from lowbit.quant.kinds import is_packed, kind_of, shape_of

_KNOWN = {
    "format": _C.FORMATS, "x_format": _C.X_FORMATS, "mapping": _C.MAPPINGS, "scale": _C.SCALE_CHOICES,
}  # fmt: skip
"""The allowed names in the fields of a spec."""


def check_names_of_formats(rows: Any) -> None:
    """Raise ValueError for an unknown format. Values of the wrong type are left to `as_declared`."""
    for row in rows if isinstance(rows, list) else ():
        spec = row.get("spec") if isinstance(row, dict) else None
        for name, known in _KNOWN.items() if isinstance(spec, dict) else ():
            if isinstance(value := spec.get(name), str) and value not in known:
                raise ValueError(f"{row.get('layer')}: {name} must be one that this lowbit has, got {value!r}")


def with_algorithms(rows: Any) -> Any:
    """Return the rows of a file with the algorithms that their specs name as text.

    Raises:
        ValueError: the text is no algorithm; the message names the layer.
    """
    return [_with_algorithm(row) for row in rows] if isinstance(rows, list) else rows


def _with_algorithm(row: Any) -> Any:
    spec = row.get("spec") if isinstance(row, dict) else None
    if not isinstance(spec, dict) or not isinstance(text := spec.get("algorithm"), str):
        return row
    try:
        return {**row, "spec": {**spec, "algorithm": algorithm_from(text)}}
    except ValueError as error:
        raise ValueError(f"{row.get('layer')}: {error}") from None


def check_rows(rows: Sequence[PlanRow]) -> None:
    """Raise ValueError if a layer has two rows, a format that does not fit its weight, or a kernel row that does not
    exist in this build. The message names the layer."""
    if twice := [name for name, count in Counter(row.layer for row in rows).items() if count > 1]:
        raise ValueError(f"a layer must have one row, got several for {', '.join(twice)}")
    known = [str(found["name"]) for found in _C.kernels("linear")]
    for row in rows:
        try:
            if row.spec is not None:
                row.spec.shape(*row.shape[-2:])
        except (ValueError, TypeError) as error:
            raise ValueError(f"{row.layer}: {error}") from None
        if len(row.shape) not in (2, 3):
            raise ValueError(f"{row.layer}: shape must be (n, k) or (experts, n, k), got {row.shape}")
        if row.row and len(row.shape) == 3:
            raise ValueError(f"{row.layer}: row must be empty for experts, got {row.row!r}")
        if row.row and row.row not in known:
            near = nearest(row.row, known)
            raise ValueError(f"{row.layer}: row must be one that lowbit.kernels() lists, got {row.row!r}{near}")


def check_fits(rows: Sequence[PlanRow], model: nn.Module) -> None:
    """Raise ValueError if the plan does not fit the model.

    The message lists the layers that are missing in the model, have another size, or are already quantized; those that
    are missing in the plan; and those whose kernel row can serve none of their calls.
    """
    modules, named = dict(model.named_modules()), {row.layer for row in rows}
    wrong = [f"{row.layer} ({reason})" for row in rows if (reason := _misfit(row, modules.get(row.layer)))]
    wrong += [
        f"{name} (no line in the plan)"
        for name, module in modules.items()
        if name not in named and kind_of(module) in MEASURED and not is_packed(module)
    ]
    if wrong:
        raise ValueError(f"Plan: model must have the layers of the plan, got {', '.join(wrong)}")


def _misfit(row: PlanRow, module: nn.Module | None) -> str:
    """Return the reason why a row of the plan cannot be applied to a layer, which is None if the model does not have
    it, or an empty string."""
    if row.spec is None:
        return f"{row.row} is preferred, and it stays float" if row.row else ""
    if module is None or kind_of(module) not in MEASURED:
        return "neither a linear layer nor experts" if module is not None else "not there"
    if is_packed(module):
        return f"already quantized as {module.spec.name}"
    if shape_of(module) != row.shape:
        return f"{text_of_size(shape_of(module))}, wanted {text_of_size(row.shape)}"
    return _unserved(row, module) if row.row else ""


def _unserved(row: PlanRow, module: nn.Module) -> str:
    """Return the reason why the kernel row of a layer can serve none of its calls, or an empty string.

    A plan is valid on every machine, and the default kernel row serves calls where the preferred one is missing. The
    same row of other instruction sets answers for it there. A layer without calls is asked for one row of x and many.
    """
    rows = alike(row.row)
    if not rows:
        return ""
    device = places.type_of_rows(next(module.parameters()).device, "linear")
    numbers = row.spec.op_args(*row.shape)
    own = str(module.weight.dtype).removeprefix("torch.")
    calls = [(m, dtype) for m, dtype, _ in row.calls] or [(1, own), (64, own)]
    if any(serves(name, m, *numbers, dtype, device) for name in rows for m, dtype in calls):
        return ""
    return f"{row.row} serves no {row.spec.name} of its calls"


def text_of_size(shape: tuple[int, ...]) -> str:
    """Return "rows x columns", or "experts x rows x columns"."""
    return " x ".join(map(str, shape))
