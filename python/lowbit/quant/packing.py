# SPDX-License-Identifier: Apache-2.0
"""Float weights to packed weights."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from lowbit import _C, devices
from lowbit.formats.algorithms import GPTQ, HQQ
from lowbit.formats.spec import LinearSpec, StoredWeight
from lowbit.quant.codes import CodedWeight
from lowbit.quant.distortion import Distortion
from lowbit.quant.gptq import gptq
from lowbit.quant.hqq import hqq
from lowbit.quant.input_moments import InputMoments
from lowbit.quant.layout import repack_weight


def all_finite(weight: Tensor) -> bool:
    """Whether no element is inf or nan; no copy of a contiguous tensor is made where there are kernels."""
    weight = weight.detach()
    has_rows = devices.places.has_rows("all_finite", weight.device)
    return _C.all_finite(weight.contiguous()) if has_rows else bool(weight.isfinite().all())


def pack_weight(
    weight: Tensor, spec: LinearSpec, inputs: InputMoments | None = None, layout: str = _C.LAYOUT
) -> tuple[nn.Parameter, Distortion]:
    """Pack a float weight ``[n, k]``, as ``spec`` says; ``inputs`` are those of its layer, which weigh the errors.

    Raises:
        ValueError: GPTQ without the hessian of the inputs.
    """
    weight = weight.detach()
    if weight.device.type == "meta" or spec.algorithm is None:
        there = weight.to(devices.places.packing(weight.device))
        packed, distortion = _pack_nearest(there, spec, inputs.importance if inputs is not None else None)
    elif isinstance(spec.algorithm, GPTQ) and (inputs is None or inputs.products is None):
        raise ValueError("pack_weight: GPTQ needs the mean of x x^T: lowbit.calibrate(model, batches, hessian=True)")
    else:
        packed, distortion = _pack_by_algorithm(weight.cpu().float(), spec, inputs)
    packed = repack_weight(packed, StoredWeight(spec, *weight.shape, _C.LAYOUT), layout)
    return nn.Parameter(packed.to(weight.device), requires_grad=False), distortion


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
