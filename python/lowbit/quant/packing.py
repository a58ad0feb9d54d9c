# SPDX-License-Identifier: Apache-2.0
"""Packing of weights and layers: `pack_group` packs the weight of selected layers, assigns it to them, and returns
their report rows."""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import _C, devices
from lowbit.formats.algorithms import HQQ
from lowbit.formats.spec import LinearSpec, StoredWeight
from lowbit.quant.codes import CodedWeight, grid_of
from lowbit.quant.gptq import Factor, gptq
from lowbit.quant.hqq import hqq
from lowbit.quant.input_moments import InputMoments
from lowbit.quant.kinds import LayerWeight, kind_of, layout_of_all
from lowbit.quant.layout import repack_weight
from lowbit.quant.report import Distortion, ReportRow, row_name

Packed = tuple[nn.Parameter, Distortion]
MEASURED_ROWS = 128
"""From so many rows of a weight on, GPTQ measures its distortion on every second, third ... row: a row costs as much as
rounding it."""


@dataclass(frozen=True, slots=True)
class Selected:
    """A weight to pack, and how.

    Args:
        name: the layer's name in ``named_modules``.
        module: the layer, of a `Kind`.
        weight: the selected weight of the layer.
        spec: how the weight will be stored.
        kernel: name of the kernel row that will serve it.
        note: a remark for the report.
    """

    name: str
    module: nn.Module
    weight: LayerWeight
    spec: LinearSpec
    kernel: str
    note: str = ""

    @classmethod
    def of(
        cls, name: str, module: nn.Module, weight: LayerWeight, spec: LinearSpec, like: Tensor, note: str = ""
    ) -> Selected:
        """Return the selected weight, with the kernel row for activations like ``like``. If the weight is looked up,
        activations are not rounded.

        Raises:
            NotImplementedError: no kernel row can serve it; the message says why.
        """
        kind = kind_of(module)
        spec = spec if kind.multiplies else replace(spec, x_format="float")
        return cls(name, module, weight, spec, kind.kernel(module, weight, spec, like), note)

    @property
    def value(self) -> Tensor:
        """The current weight of the layer."""
        return self.module._parameters[self.weight.key]

    @property
    def row_name(self) -> str:
        """The name of its row in the report."""
        return row_name(self.name, self.module, self.weight)


class Matrices:
    """Matrices ``[n, k]`` that are made one at a time, to be packed into one weight.

    Args:
        count: the number of matrices.
        make: function of a number below ``count`` that returns its matrix.
    """

    def __init__(self, count: int, make: Callable[[int], Tensor]) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Tensor]:
        return map(self._make, range(self._count))


def by_weight(selected: Iterable[Selected]) -> list[list[Selected]]:
    """Group the selected weights that share a Parameter."""
    groups: dict[tuple[int, bool], list[Selected]] = defaultdict(list)
    for item in selected:
        groups[id(item.value), item.weight.transposed].append(item)
    return list(groups.values())


def pack_group(
    group: Sequence[Selected],
    make: Callable[[str], Packed],
    before: int,
    *,
    layout: str | None = None,
    restore: Callable[[Any], None] | None = None,
    hold: bool = True,
) -> tuple[nn.Parameter, list[ReportRow]]:
    """Pack the shared weight of these layers and assign it to all of them; return it and their report rows.

    Args:
        group: the layers. The rows after the first say that they share the weight of the first.
        make: function that packs the weight in a given layout.
        before: size of the float weight in bytes.
        layout: the layout of the packed weight; None is the layout that all layers of the group can share.
        restore: function that turns a layer in training back into its float class.
        hold: False leaves the layers unchanged.
    """
    first, *others = group
    layout = layout or layout_of_all(item.module for item in group)
    packed, distortion = make(layout)
    size = before, packed.nbytes
    row = ReportRow.packed(first.row_name, first.spec, first.weight.shape, *size, distortion, first.kernel, first.note)
    rows = [row, *(row.shared(item.row_name, item.spec.name, item.kernel) for item in others)]
    for item in group if hold else ():
        if restore is not None:
            restore(item.module)
        hold_packed(item, packed, layout)
    return packed, rows


def hold_packed(item: Selected, packed: nn.Parameter, layout: str, dtype: torch.dtype | None = None) -> None:
    """Assign a packed weight to a layer. Its spec no longer names the algorithm that chose the codes."""
    stored = item.weight.stored(replace(item.spec, algorithm=None), layout)
    kind_of(item.module).hold(item.module, item.weight.key, packed, stored, dtype)


def check_finite(function: str, label: str, weight: Tensor) -> None:
    """Raise ValueError if a weight contains inf or nan; a weight on the meta device passes."""
    if not weight.is_meta and not all_finite(weight):
        raise ValueError(f"{function}: {label} must be finite, got inf or nan")


def all_finite(weight: Tensor) -> bool:
    """Return whether no element is inf or nan. Where there are kernels, a contiguous tensor is not copied."""
    weight = weight.detach()
    has_rows = devices.places.has_rows("all_finite", weight.device)
    return _C.all_finite(weight.contiguous()) if has_rows else bool(weight.isfinite().all())


def pack_weight(
    weight: Tensor | Matrices,
    spec: LinearSpec,
    inputs: InputMoments | Sequence[InputMoments] | None = None,
    layout: str = _C.LAYOUT,
) -> Packed:
    """Pack a float weight, and return it with its distortion.

    Args:
        weight: ``[n, k]`` or ``[experts, n, k]``; or the matrices of a weight that is never in memory as a whole.
        spec: how the weight is stored.
        inputs: the input moments of the layer, or of each expert, which weight the errors; None weights all equally.
        layout: the layout of the packed weight.

    Raises:
        ValueError: the algorithm is GPTQ, and ``inputs`` have no products.
    """
    alone = isinstance(weight, Tensor) and weight.dim() == 2
    matrices = [weight] if alone else weight
    of_each = inputs if isinstance(inputs, Sequence) else [inputs] * len(matrices)
    packed, distortions = None, []
    for place, (matrix, of_matrix) in enumerate(zip(matrices, of_each, strict=True)):
        part, distortion = _pack_matrix(matrix.detach(), of_matrix, spec, layout)
        distortions.append(distortion)
        if alone:
            packed = part
        else:
            packed = part.new_empty(len(matrices), *part.shape) if packed is None else packed
            packed[place] = part
    return nn.Parameter(packed, requires_grad=False), functools.reduce(operator.add, distortions)


def pack_weights(
    weights: Sequence[Tensor], spec: LinearSpec, inputs: InputMoments, layouts: Sequence[str]
) -> list[Packed]:
    """Pack float weights ``[n, k]`` that multiply the same inputs by GPTQ, at once, and return each with its
    distortion.

    Args:
        weights: the weights, of one k.
        spec: how they are stored; its algorithm is GPTQ.
        inputs: the input moments of the layers, with products.
        layouts: the layout of each packed weight.
    """
    found = _pack_by_gptq([weight.detach().cpu().float() for weight in weights], spec, inputs)
    packed = []
    for weight, layout, (part, distortion) in zip(weights, layouts, found, strict=True):
        there = _laid_out(part, StoredWeight(spec, *weight.shape, _C.LAYOUT), layout).to(weight.device)
        packed.append((nn.Parameter(there, requires_grad=False), distortion))
    return packed


def _pack_matrix(
    weight: Tensor, inputs: InputMoments | None, spec: LinearSpec, layout: str
) -> tuple[Tensor, Distortion]:
    if weight.device.type == "meta" or spec.algorithm is None:
        there = weight.to(devices.places.packing(weight.device))
        packed, distortion = _pack_nearest(there, spec, inputs.importance if inputs is not None else None)
    elif isinstance(spec.algorithm, HQQ):
        packed, distortion = _pack_by_hqq(weight.cpu().float(), spec, spec.algorithm)
    elif inputs is None or not inputs.has_products:
        raise ValueError(
            "pack_weight: inputs must have the mean of x x^T for GPTQ: lowbit.calibrate(model, batches, hessian=True)"
        )
    else:
        ((packed, distortion),) = _pack_by_gptq([weight.cpu().float()], spec, inputs)
    return _laid_out(packed, StoredWeight(spec, *weight.shape, _C.LAYOUT), layout).to(weight.device), distortion


def _laid_out(packed: Tensor, stored: StoredWeight, layout: str) -> Tensor:
    return packed if layout == stored.layout else repack_weight(packed, stored, layout)


def _pack_nearest(weight: Tensor, spec: LinearSpec, importance: Tensor | None) -> tuple[Tensor, Distortion]:
    n, k = weight.shape
    packed = torch.zeros(
        spec.shape(n, k), dtype=torch.uint8, device=weight.device
    )  # zeros, so that the padding is defined and files are reproducible
    if weight.device.type == "meta":
        return packed, Distortion()
    _, _, format, group_size, asymmetric = spec.weight_args(n, k)
    choice = _C.MAPPINGS[spec.mapping], _C.SCALE_CHOICES[spec.scale]
    if importance is not None:
        importance = importance.to(weight.device)
    sums = _C.quantize(weight.contiguous(), packed, format, group_size, asymmetric, *choice, importance)
    return packed, Distortion(*sums)


def _pack_by_hqq(weight: Tensor, spec: LinearSpec, options: HQQ) -> tuple[Tensor, Distortion]:
    codes, scale, zero = hqq(weight, spec.group_size, _C.FORMAT_FACTS[spec.format]["code_max"], options)
    packed = CodedWeight.of(codes, scale, zero, spec).pack()
    return packed, Distortion(*(_square(matrix) for matrix in _with_errors(weight, packed, spec)))


def _pack_by_gptq(weights: Sequence[Tensor], spec: LinearSpec, inputs: InputMoments) -> list[tuple[Tensor, Distortion]]:
    """Pack weights float32 ``[n, k]`` of layers that share their inputs. The distortion of a large weight is that of
    ``MEASURED_ROWS`` rows."""
    code_max = _C.FORMAT_FACTS[spec.format]["code_max"]

    def scales(part: Tensor, importance: Tensor) -> tuple[Tensor, Tensor]:
        searched = importance if spec.scale == "search" else None
        packed = _pack_nearest(part, spec, searched)[0]
        return grid_of(packed, StoredWeight(spec, *part.shape, _C.LAYOUT))

    factor = Factor.of(inputs.hessian, spec.algorithm)
    together = torch.cat([*weights]) if len(weights) > 1 else weights[0]
    found = gptq(together, factor, spec.group_size, code_max, spec.algorithm.act_order, scales)
    each = zip(*(values.split([len(weight) for weight in weights]) for values in found), strict=True)
    packed = []
    for weight, (codes, scale, zero) in zip(weights, each, strict=True):
        coded = CodedWeight.of(codes, scale, zero if spec.asymmetric else None, spec)
        rows = slice(None, None, -(-len(weight) // MEASURED_ROWS))
        errors = _with_errors(weight[rows].contiguous(), coded.rows(rows).pack(), spec)
        packed.append((coded.pack(), Distortion(*factor.loss(torch.cat(errors)).view(len(errors), -1).sum(1).tolist())))
    return packed


def _with_errors(weight: Tensor, packed: Tensor, spec: LinearSpec) -> list[Tensor]:
    """Return a weight, its error, and the error that absmax scales and the nearest codes would cause."""
    absmax = _pack_nearest(weight, replace(spec, scale="absmax", algorithm=None), None)[0]
    return [
        weight,
        *(weight - torch.ops.lowbit.dequantize(of, *spec.weight_args(*weight.shape)) for of in (packed, absmax)),
    ]


def _square(matrix: Tensor) -> float:
    return float(matrix.square().sum(dtype=torch.float64))
