# SPDX-License-Identifier: Apache-2.0
"""OCP Microscaling (MX) 1.0: MXFP4 weights as QuantLinear holds them, exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.formats.spec import LinearSpec
from lowbit.quant.quant_linear import QuantLinear

_GROUP = 32
_SMALLEST = 2.0**-24  # of float16: what a group scale may be of the largest of its row


def from_mxfp4(blocks: Tensor, scales: Tensor, bias: Tensor | None = None) -> QuantLinear:
    """Return the layer of an MXFP4 weight ``[n, k]``: e2m1 codes, and a power of two for each 32 of them.

    Args:
        blocks: uint8 ``[n, k / 2]``, or ``[n, k / 32, 16]``: two codes in a byte, the first in the low nibble.
        scales: uint8 ``[n, k / 32]``, e8m0: 2 ** (scale - 127).
        bias: ``[n]`` or None.

    Raises:
        ValueError: another dtype or shape, a scale of nan (255), or scales of one row more than 2 ** 24 apart.

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
    scale = torch.exp2(scales.double() - 127).float()
    largest = scale.amax(1, keepdim=True).clamp(min=2.0**-102)  # 2 ** -126 is the least that a scale may be
    if (scales == 255).any() or (scale < largest * _SMALLEST).any():
        raise ValueError(
            "from_mxfp4: scales of a row must be within 2 ** 24 of its largest, 2 ** -126 or more, and no nan (255)"
        )
    codes = torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)
    return QuantLinear.pack(codes, scale, None, LinearSpec("fp4_e2m1", _GROUP), bias)
