# SPDX-License-Identifier: Apache-2.0
"""Float weights to packed weights, and layers to packed layers: `pack_group` packs the weight of layers that were
selected, gives it to them and writes their lines of the report."""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import _C, devices
from lowbit.formats.algorithms import GPTQ, HQQ
from lowbit.formats.spec import LinearSpec, StoredWeight
from lowbit.quant.codes import CodedWeight
from lowbit.quant.gptq import gptq
from lowbit.quant.hqq import hqq
from lowbit.quant.input_moments import InputMoments
from lowbit.quant.kinds import LayerWeight, kind_of, layout_of_all
from lowbit.quant.layout import repack_weight
from lowbit.quant.report import Distortion, ReportRow, row_name

Packed = tuple[nn.Parameter, Distortion]


@dataclass(frozen=True, slots=True)
class Selected:
    """A weight to pack, and how.

    Args:
        name: the layer's name in ``named_modules``.
        module: the layer, of a `Kind`.
        weight: the selected weight of the layer.
        spec: its storage.
        kernel: the row that will serve it.
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
        """Choose the row for activations like ``like``. A weight that is looked up takes none to round.

        Raises:
            NotImplementedError: no row can serve it; says why.
        """
        kind = kind_of(module)
        spec = spec if kind.multiplies else replace(spec, x_format="float")
        return cls(name, module, weight, spec, kind.kernel(module, weight, spec, like), note)

    @property
    def value(self) -> Tensor:
        """The weight as the layer holds it now."""
        return self.module._parameters[self.weight.key]

    @property
    def row_name(self) -> str:
        """The name of its line in the report."""
        return row_name(self.name, self.module, self.weight)


def by_weight(selected: Iterable[Selected]) -> list[list[Selected]]:
    """Group layers that share one Parameter."""
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
    """Pack the one weight of these layers and hand it to all of them; return it, and their lines of the report.

    Args:
        group: the layers; a line that is not the first says that it shares the weight of the first.
        make: packs the weight in a layout.
        before: bytes of the float weight.
        layout: the layout of the packed weight; None: that of all layers in the group.
        restore: makes a layer in training the float one that it was.
        hold: False leaves the layers as they are.
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
    """Make a layer one that holds the packed weight; how its codes were found is over."""
    stored = item.weight.stored(replace(item.spec, algorithm=None), layout)
    kind_of(item.module).hold(item.module, item.weight.key, packed, stored, dtype)


def check_finite(function: str, label: str, weight: Tensor) -> None:
    """Raise ValueError for a weight with inf or nan; one without values passes."""
    if not weight.is_meta and not all_finite(weight):
        raise ValueError(f"{function}: {label} must be finite, got inf or nan")


def all_finite(weight: Tensor) -> bool:
    """Whether no element is inf or nan; no copy of a contiguous tensor is made where there are kernels."""
    weight = weight.detach()
    has_rows = devices.places.has_rows("all_finite", weight.device)
    return _C.all_finite(weight.contiguous()) if has_rows else bool(weight.isfinite().all())


def pack_weight(
    weight: Tensor,
    spec: LinearSpec,
    inputs: InputMoments | Sequence[InputMoments] | None = None,
    layout: str = _C.LAYOUT,
) -> Packed:
    """Pack a float weight ``[n, k]`` or ``[experts, n, k]``, as ``spec`` says; ``inputs`` are those of its layer, or of
    each expert, which weigh the errors.

    Raises:
        ValueError: GPTQ without the hessian of the inputs.
    """
    weight = weight.detach()
    matrices = weight if weight.dim() == 3 else [weight]
    of_each = inputs if isinstance(inputs, Sequence) else [inputs] * len(matrices)
    parts = [_pack_matrix(*each, spec, layout) for each in zip(matrices, of_each, strict=True)]
    packed = torch.stack([part for part, _ in parts]) if weight.dim() == 3 else parts[0][0]
    distortion = functools.reduce(operator.add, (part for _, part in parts))
    return nn.Parameter(packed, requires_grad=False), distortion


def _pack_matrix(
    weight: Tensor, inputs: InputMoments | None, spec: LinearSpec, layout: str
) -> tuple[Tensor, Distortion]:
    if weight.device.type == "meta" or spec.algorithm is None:
        there = weight.to(devices.places.packing(weight.device))
        packed, distortion = _pack_nearest(there, spec, inputs.importance if inputs is not None else None)
    elif isinstance(spec.algorithm, GPTQ) and (inputs is None or inputs.products is None):
        raise ValueError("pack_weight: GPTQ needs the mean of x x^T: lowbit.calibrate(model, batches, hessian=True)")
    else:
        packed, distortion = _pack_by_algorithm(weight.cpu().float(), spec, inputs)
    if layout != _C.LAYOUT:
        packed = repack_weight(packed, StoredWeight(spec, *weight.shape, _C.LAYOUT), layout)
    return packed.to(weight.device), distortion


def _pack_nearest(weight: Tensor, spec: LinearSpec, importance: Tensor | None) -> tuple[Tensor, Distortion]:
    n, k = weight.shape
    packed = torch.zeros(
        spec.shape(n, k), dtype=torch.uint8, device=weight.device
    )  # padding too: files are reproducible
    if weight.device.type == "meta":
        return packed, Distortion()
    _, _, format, group_size, asymmetric = spec.weight_args(n, k)
    choice = _C.MAPPINGS[spec.mapping], _C.SCALE_CHOICES[spec.scale]
    if importance is not None:
        importance = importance.to(weight.device)
    sums = _C.quantize(weight.contiguous(), packed, format, group_size, asymmetric, *choice, importance)
    return packed, Distortion(*sums)


def _pack_by_algorithm(weight: Tensor, spec: LinearSpec, inputs: InputMoments | None) -> tuple[Tensor, Distortion]:
    n, k = weight.shape
    code_max = _C.FORMAT_FACTS[spec.format]["code_max"]

    def scales(part: Tensor, importance: Tensor) -> tuple[Tensor, Tensor]:
        searched = importance if spec.scale == "search" else None
        packed = _pack_nearest(part, spec, searched)[0]
        weight = CodedWeight.unpack(packed, StoredWeight(spec, *part.shape, _C.LAYOUT))
        return weight.scale, weight.zero_point

    hessian = None
    if isinstance(spec.algorithm, HQQ):
        codes, scale, zero = hqq(weight, spec.group_size, code_max, spec.algorithm)
    else:
        hessian = inputs.hessian
        codes, scale, zero = gptq(weight, hessian, spec.group_size, code_max, spec.algorithm, scales)
    packed = CodedWeight.of(codes, scale, zero if spec.asymmetric else None, spec).pack()
    absmax = _pack_nearest(weight, replace(spec, scale="absmax", algorithm=None), None)[0]
    errors = [weight - _decode(of, n, k, spec) for of in (packed, absmax)]
    return packed, Distortion(*(_square(matrix, hessian) for matrix in (weight, *errors)))


def _decode(packed: Tensor, n: int, k: int, spec: LinearSpec) -> Tensor:
    return torch.ops.lowbit.dequantize(packed, *spec.weight_args(n, k))


def _square(matrix: Tensor, hessian: Tensor | None) -> float:
    """The sum over rows r of r H r^T, of r r^T without a hessian."""
    return float((matrix * (matrix if hessian is None else matrix @ hessian)).sum(dtype=torch.float64))
