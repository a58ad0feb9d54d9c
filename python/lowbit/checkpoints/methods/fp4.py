# SPDX-License-Identifier: Apache-2.0
"""Weights of e2m1 codes with a scale per block, as several methods have them: NVFP4 (16 codes, e4m3 scales and a float32
number for the whole weight) and MXFP4 (32 codes, e8m0 scales). Two codes are a byte, the first in the low nibble, which
is a stream of bits already."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit import _C
from lowbit.checkpoints.methods.method import LayerCodes, LayerTensors, Method
from lowbit.formats.spec import StoredWeight
from lowbit.quant.codes import MXFP4_RANGE, mxfp4_scales_fit, pack_mxfp4, pack_stream

_NV, _MX = 16, 32


def nvfp4_codes(method: Method, layer: LayerTensors, codes: str, scales: str, whole: Tensor) -> LayerCodes:
    """Return the packed weight ``e2m1 * scale * whole``; ``whole`` is one number."""
    _check_blocks(layer, _NV)
    n, k = layer.n, layer.k
    stream = layer.read(codes, (n, k // 2), torch.uint8)
    scale = layer.read(scales, (n, k // _NV), torch.float8_e4m3fn).half()  # exact
    if not (scale.isfinite().all() and whole.float().isfinite().all()):
        raise layer.error(scales, "finite, as the scale of the whole weight", "inf or nan")
    spec = method.spec("fp4_e2m1", _NV, False, "float")
    column = whole.float().reshape(1).repeat(n)
    return LayerCodes(pack_stream(stream, column, scale, None, StoredWeight(spec, n, k, _C.LAYOUT)), spec)


def mxfp4_codes(method: Method, layer: LayerTensors, codes: str, scales: str) -> LayerCodes:
    """Return the packed weight ``e2m1 * 2^(scale - 127)``."""
    _check_blocks(layer, _MX)
    n, k = layer.n, layer.k
    blocks = layer.read(codes, (n, k // 2), torch.uint8).unflatten(1, (-1, _MX // 2))
    return mxfp4_packed(method, blocks, powers(layer, scales, (n, k // _MX)))


def powers(layer: LayerTensors, part: str, shape: tuple[int, ...]) -> Tensor:
    """Return scales of e8m0, uint8 ``[..., groups]``: the exponents of powers of two, plus 127.

    Raises:
        ValueError: as `LayerTensors.read`, or a row has scales that are further apart than float16 holds.
    """
    power = layer.read(part, shape, torch.uint8, torch.float8_e8m0fnu).view(torch.uint8)
    if not mxfp4_scales_fit(power):
        told = f"within {MXFP4_RANGE} of the largest of its row, and no 255 (nan)"
        raise layer.error(part, told, f"{int(power.min())}..{int(power.max())}")
    return power


def mxfp4_packed(method: Method, blocks: Tensor, power: Tensor, rows: Tensor | None = None) -> LayerCodes:
    """Return the packed weight of codes ``[..., n, blocks, 16]`` and the exponents of their scales; rows: their order."""
    spec = method.spec("fp4_e2m1", _MX, False, "float")
    return LayerCodes(pack_mxfp4(blocks, power, rows=rows), spec)


def _check_blocks(layer: LayerTensors, size: int) -> None:
    if layer.k % size:
        raise ValueError(f"{layer.name}: k must be a multiple of {size}, got k={layer.k}")
