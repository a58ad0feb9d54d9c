# SPDX-License-Identifier: Apache-2.0
"""MXFP4 (OCP Microscaling 1.0) and NVIDIA's NVFP4 weights as QuantLinear layers, exactly. Both have e2m1 codes and one
scale per block."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.formats.spec import LinearSpec
from lowbit.quant.codes import MXFP4_RANGE, CodedWeight, mxfp4_scales_fit, pack_mxfp4
from lowbit.quant.quant_linear import QuantLinear

_GROUP, _NV_GROUP = 32, 16


def from_mxfp4(blocks: Tensor, scales: Tensor, bias: Tensor | None = None) -> QuantLinear:
    """Return a QuantLinear with an MXFP4 weight ``[n, k]``: e2m1 codes, with a power of two for each block of 32.

    Args:
        blocks: uint8 ``[n, k / 2]`` or ``[n, k / 32, 16]``: two codes per byte, the first in the low nibble.
        scales: uint8 ``[n, k / 32]``, e8m0: 2 ** (scale - 127).
        bias: ``[n]`` or None.

    Raises:
        ValueError: a dtype or shape differs, a scale is nan (255), or the scales of a row differ by more than a factor
            of 2 ** 24.

    Example:
        >>> layer = from_mxfp4(state["down_proj_blocks"][0], state["down_proj_scales"][0])
    """
    pairs = blocks.flatten(1)
    n, k = pairs.shape[0], 2 * pairs.shape[1]
    fits = k % _GROUP == 0 and list(scales.shape) == [n, k // _GROUP]
    if not fits or blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(
            f"from_mxfp4: blocks and scales must be uint8 [n, k / 2] and [n, k / 32], "
            f"got {blocks.dtype} {list(blocks.shape)} and {scales.dtype} {list(scales.shape)}"
        )
    if not mxfp4_scales_fit(scales):
        raise ValueError(
            f"from_mxfp4: scales of a row must be within 2 ** {MXFP4_RANGE} of its largest, 2 ** -126 or more, and no nan (255)"
        )
    packed = pack_mxfp4(pairs.unflatten(1, (-1, _GROUP // 2)), scales)
    return QuantLinear.from_packed(packed, n, k, LinearSpec("fp4_e2m1", _GROUP), bias)


def from_nvfp4(
    weight: Tensor, weight_scale: Tensor, weight_scale_2: Tensor | float = 1.0, bias: Tensor | None = None
) -> QuantLinear:
    """Return a QuantLinear with an NVFP4 weight ``[n, k]``: ``w = e2m1 * weight_scale * weight_scale_2``.

    There is a float8 scale for each block of 16 codes and a float32 scale for the whole weight. The argument names are
    those of ModelOpt's files. compressed-tensors has ``weight_packed``, ``weight_scale`` and ``weight_global_scale``,
    which is ``1 / weight_scale_2``; torchao's NVFP4Tensor has ``qdata``, ``scale`` and ``per_tensor_scale``.

    Args:
        weight: uint8 ``[n, k / 2]``: two codes per byte, the first in the low nibble.
        weight_scale: torch.float8_e4m3fn ``[n, k / 16]``, in row-major order (not swizzled for tensor cores).
        weight_scale_2: one float32.
        bias: ``[n]`` or None.

    Raises:
        ValueError: a dtype or shape differs, or a scale is inf or nan.

    Example:
        >>> layer = from_nvfp4(state["up_proj.weight"], state["up_proj.weight_scale"], state["up_proj.weight_scale_2"])
    """
    whole = torch.as_tensor(weight_scale_2, dtype=torch.float32)
    fits = weight.dim() == 2 and list(weight_scale.shape) == [weight.shape[0], 2 * weight.shape[1] // _NV_GROUP]
    fits = fits and weight.shape[1] % (_NV_GROUP // 2) == 0 and whole.numel() == 1
    if not fits or weight.dtype != torch.uint8 or weight_scale.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"from_nvfp4: weight, weight_scale and weight_scale_2 must be uint8 [n, k / 2], float8_e4m3fn [n, k / 16] "
            f"and one float32, got {weight.dtype} {list(weight.shape)}, {weight_scale.dtype} "
            f"{list(weight_scale.shape)} and {list(whole.shape)}"
        )
    scale = weight_scale.half()  # exact
    if not (scale.isfinite().all() and whole.isfinite().all()):
        raise ValueError("from_nvfp4: weight_scale and weight_scale_2 must be finite, got inf or nan")
    codes, spec = _codes(weight), LinearSpec("fp4_e2m1", _NV_GROUP)
    n, k = codes.shape
    coded = CodedWeight(spec, codes, whole.reshape(1).repeat(n), scale, None)
    return QuantLinear.from_packed(coded.pack(), n, k, spec, bias)


def _codes(pairs: Tensor) -> Tensor:
    return torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)
