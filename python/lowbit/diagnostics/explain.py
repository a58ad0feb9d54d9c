# SPDX-License-Identifier: Apache-2.0
"""explain: the kernel row that each quantized layer uses, and why others do not run; the program of a mod of
flex_attention; the ops that a compilation has folded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowbit import _C
from lowbit.backends.report import added_by, named
from lowbit.compile.options import fold_report
from lowbit.devices import places
from lowbit.tables.folding import folded, label
from lowbit.tables.table import Table


@dataclass(frozen=True, slots=True)
class LayerExplanation:
    """One layer: its format, the kernel row that it uses, and the other rows, each with the first reason why it was not
    used."""

    layer: str
    format: str
    shape: str
    row: str
    others: tuple[tuple[str, str], ...]


class Explanation(list[LayerExplanation]):
    """One entry per quantized layer. It prints as a table with one line for layers of one kind. Below, it says for each
    format why other rows do not run; of the rows with the same reason, only the first is listed."""

    _HEADER = ("layer", "format", "n x k", "row")
    _BELOW = ("format", "why not", "other rows")
    _SHOWN = 4

    @property
    def layers(self) -> Table:
        """A table with one line for each layer. The explanation itself has one line for layers of one kind."""
        return Table(self._HEADER, [(label(entry.layer), *_cells(entry)) for entry in self])

    def _table(self) -> Table:
        return Table(self._HEADER, [(name, *_cells(entries[0])) for name, entries in folded(self, _cells)])

    def _reasons(self) -> list[tuple[str, str, str]]:
        names: dict[tuple[str, str], dict[str, None]] = {}
        by = added_by()
        for entry in self:
            for name, reason in entry.others:
                names.setdefault((entry.format, reason), {})[named(name, by)] = None
        return [(*key, self._told([*rows])) for key, rows in names.items()]

    def _told(self, rows: list[str]) -> str:
        more = f" and {len(rows) - self._SHOWN} more" if len(rows) > self._SHOWN else ""
        return ", ".join(rows[: self._SHOWN]) + more

    def __repr__(self) -> str:
        if not self:
            return "no quantized linear layer here"
        return f"{self._table()}\n\n{Table(self._BELOW, self._reasons())}"

    def _repr_html_(self) -> str:
        if not self:
            return "<p>no quantized linear layer here</p>"
        return self._table()._repr_html_() + Table(self._BELOW, self._reasons())._repr_html_()


def _cells(entry: LayerExplanation) -> tuple[str, ...]:
    return entry.format, entry.shape, named(entry.row, added_by())


def explain(module: Any, *, m: int = 1, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Return the kernel row that each ``QuantLinear`` in a module uses, and why others do not run.

    A score_mod, a mask_mod or a BlockMask is explained by its program and its blocks. The options of `compile_options`
    are explained by the ops that were folded into linear ops when compiling with them, and by the times of
    ``max_autotune``.

    Args:
        module: a ``QuantLinear`` or any module that contains some; or a mod for flex_attention, or a BlockMask; or the
            dict of ``compile_options``; or the folder of a checkpoint, which is explained by the line that loads it into
            packed weights, or by the reason why lowbit does not read it.
        m: the rows of the activations (tokens).
        dtype: the dtype of the activations.
        options: ``q_len``, ``kv_len`` and ``block_size``, for counting the blocks of a mask_mod.

    Returns:
        An ``Explanation`` (a list with an entry per layer), a ``ModExplanation``, a ``FoldReport`` or a
        ``CheckpointExplanation``. All print as text. ``source("cuda")`` or ``source("opencl")`` of a ``ModExplanation`` is its program as device functions in
        CUDA C or OpenCL C.

    Raises:
        TypeError: ``module`` is none of these.
    """
    if isinstance(module, str | os.PathLike):
        from lowbit.diagnostics.explain_checkpoint import explain_checkpoint

        return explain_checkpoint(module)
    if not isinstance(module, nn.Module) and (callable(module) or type(module).__name__ == "BlockMask"):
        from lowbit.attention.explain_mod import explain_mod

        return explain_mod(module, **options)
    folded = fold_report(module) if isinstance(module, dict) else None
    if folded is not None and not options:
        return folded
    if not isinstance(module, nn.Module) or options:
        raise TypeError(f"explain: module must be a torch.nn.Module, got {type(module).__name__}")
    return Explanation(
        _explain_layer(name or type(layer).__name__, layer, m, dtype)
        for name, layer in module.named_modules()
        if hasattr(layer, "op_args") and isinstance(layer, nn.Linear)
    )


def _explain_layer(name: str, layer: Any, m: int, dtype: torch.dtype) -> LayerExplanation:
    n, k, *_ = layer.op_args
    device = places.type_of_rows(layer.weight.device, "linear")
    rows = _C.explain_linear(m, *layer.op_args, str(dtype).removeprefix("torch."), device, layer.row_number)
    chosen = next((str(row["name"]) for row in rows if row["chosen"]), "none")
    others = tuple((str(row["name"]), str(row["reason"])) for row in rows if not row["chosen"])
    return LayerExplanation(name, layer.spec.name, f"{n} x {k}", chosen, others)
