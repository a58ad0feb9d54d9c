# SPDX-License-Identifier: Apache-2.0
"""compare_checkpoints: the difference between the weights of two checkpoints, layer by layer, in dB."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.formats.spec import StoredWeight
from lowbit.quant.kinds import layer_with, layout_name, weight_in, weight_name
from lowbit.quant.layout import numbers_of, repack_weight
from lowbit.quant.report import decibel
from lowbit.quant.safetensors_file import SafetensorsFile, safetensors_files
from lowbit.tables.folding import spread
from lowbit.tables.layer_table import LayerTable
from lowbit.tables.pyplot import pyplot


@dataclass(frozen=True, slots=True)
class ComparedLayer:
    """One weight that both checkpoints have.

    Args:
        layer: its name, without ``.weight``.
        a, b: its formats, such as ``bfloat16`` or ``int4 g32``.
        shape: the shape of the float weight.
        signal, noise: the sums of squares of the weight in a, and of its difference from that in b.
    """

    layer: str
    a: str
    b: str
    shape: tuple[int, ...]
    signal: float
    noise: float

    @property
    def error_db(self) -> float:
        """The value 10 log10(signal / noise); larger is better, and inf means equal weights."""
        return decibel(self.signal, self.noise)


@dataclass(repr=False)
class Comparison(LayerTable):
    """The result of `compare_checkpoints`. It prints as a table, in notebooks too; ``plot()`` draws it, and ``layers``
    has a line for each weight.

    Args:
        a, b: the checkpoints.
        rows: one per weight of two or more dimensions, in the order of a's names.
        only_a, only_b: the names of such weights that only one checkpoint has.
    """

    a: str
    b: str
    rows: list[ComparedLayer] = field(default_factory=list)
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)

    COLUMNS = ("layer", "a", "b", "shape", "error dB")

    @property
    def error_db(self) -> float:
        """The SQNR of all weights together."""
        return decibel(sum(row.signal for row in self.rows), sum(row.noise for row in self.rows))

    @staticmethod
    def _alike(row: ComparedLayer) -> tuple[object, ...]:
        return row.a, row.b, row.shape

    @staticmethod
    def _cells(rows: list[ComparedLayer]) -> tuple[str, ...]:
        row = rows[0]
        return row.a, row.b, "x".join(map(str, row.shape)), spread((row.error_db for row in rows), _text)

    def plot(self, ax: Any = None) -> Any:
        """Draw the error of each layer that differs, in the order of the model, with a colour per kind; return the
        axes.

        Args:
            ax: matplotlib axes to draw into; None creates new ones.

        Raises:
            ImportError: matplotlib is not installed.
        """
        if ax is None:
            _, ax = pyplot("Comparison.plot").subplots(figsize=(9, 4), constrained_layout=True)
        kinds: dict[str, list[tuple[int, float]]] = {}
        for i, row in enumerate(self.rows):
            if math.isfinite(row.error_db):
                kinds.setdefault(row.layer.rpartition(".")[2], []).append((i, row.error_db))
        for kind, points in kinds.items():
            ax.plot(*zip(*points, strict=True), marker="o", markersize=4, linewidth=0.8, label=kind)
        ax.set(xlabel="weight, in the order of the file", ylabel="error, dB (up is better)")
        ax.set_title(f"{Path(self.b).name} against {Path(self.a).name}: {self.error_db:.1f} dB of all weights")
        ax.grid(alpha=0.3)
        if kinds:
            ax.legend(fontsize="small", ncols=2)
        return ax

    def _below(self) -> list[str]:
        same = sum(not row.noise for row in self.rows)
        lines = [f"all weights: {_text(self.error_db)} dB; {same} of {len(self.rows)} are the same"]
        for path, names in ((self.a, self.only_a), (self.b, self.only_b)):
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                lines.append(f"only in {path}: {', '.join(names[:3])}{more}")
        return lines


def compare_checkpoints(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> Comparison:
    """Compare the weights of two checkpoints by name, one at a time. Each may be float or packed.

    Args:
        a: the reference: a folder with safetensors files, or such a file.
        b: the checkpoint that is compared with it.

    Returns:
        A Comparison, which prints as a table; ``plot()`` draws it.

    Raises:
        FileNotFoundError: a checkpoint does not exist.
        ValueError: a file is not safetensors, the checkpoints have no weight in common, or a weight has different
            shapes.

    Example:
        >>> lowbit.compare_checkpoints("model", "model-int4")
    """
    first, second = _Weights(Path(a)), _Weights(Path(b))
    result = Comparison(str(a), str(b))
    result.only_a = [name for name in first.homes if name not in second.homes]
    result.only_b = [name for name in second.homes if name not in first.homes]
    for name in first.homes:
        if name in second.homes:
            result.rows.append(_compared(name, first, second))
    if not result.rows:
        raise ValueError(f"compare_checkpoints: {a} and {b} must have weights of the same names, got none")
    return result


class _Weights:
    """The weights of a checkpoint, decoded one at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.homes: dict[str, SafetensorsFile] = {}
        self.layouts: dict[str, SafetensorsFile] = {}
        for file in map(SafetensorsFile, safetensors_files(path)):
            for name, entry in file.entries.items():
                layer = layer_with(weight_name(name) or name)
                if layer is not None and weight_name(name) is not None:
                    self.layouts[layer] = file
                elif layer is not None and len(entry.shape) >= 2:
                    self.homes[layer] = file

    def read(self, name: str) -> tuple[str, Tensor]:
        """Return the format of a weight, and the weight in float32."""
        file, key = self.homes[name], weight_in(name)
        weight = file.read(key)
        if name not in self.layouts:
            if not weight.is_floating_point():
                raise ValueError(
                    f"compare_checkpoints: {key} of {file.path} must be floating or have a layout, got {weight.dtype} "
                    "without one"
                )
            return str(weight.dtype).removeprefix("torch."), weight.float()
        try:
            stored = numbers_of(self.layouts[name].read(layout_name(key)))
        except ValueError as error:
            raise ValueError(f"compare_checkpoints: {key} of {file.path} has {error}") from None
        return stored.spec.name, _decoded(weight, stored)


def _decoded(weight: Tensor, stored: StoredWeight) -> Tensor:
    args = stored.spec.weight_args(stored.n, stored.k)
    return torch.ops.lowbit.dequantize(repack_weight(weight, stored), *args).float()


def _compared(name: str, first: _Weights, second: _Weights) -> ComparedLayer:
    (a_format, a), (b_format, b) = first.read(name), second.read(name)
    if a.shape != b.shape and a.shape == b.T.shape:
        b = b.T  # the weight of transformers' Conv1D, which is transposed if float
    if a.shape != b.shape:
        raise ValueError(
            f"compare_checkpoints: {name} must have the shape {list(a.shape)} of {first.path}, "
            f"got {list(b.shape)} in {second.path}"
        )
    signal = noise = 0.0
    for a_rows, b_rows in _slices(a, b):
        signal += float(a_rows.double().square().sum())
        noise += float((a_rows.double() - b_rows.double()).square().sum())
    return ComparedLayer(name, a_format, b_format, tuple(a.shape), signal, noise)


def _slices(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parts of at most a MiB of float64, or one row, so that the whole is never copied."""
    rows = max(1, (1 << 17) // max(1, a[0].numel())) if len(a) else 1
    for i in range(0, len(a), rows):
        yield a[i : i + rows], b[i : i + rows]


def _text(error_db: float) -> str:
    return "same" if error_db == math.inf else f"{error_db:.1f}"
