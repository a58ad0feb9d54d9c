# SPDX-License-Identifier: Apache-2.0
"""Moments in memory: allocate, encode, decode. What the codes mean: docs/formats.md."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit import _C

BITS = {32: "float32", 16: "bfloat16", 8: "dynamic8", 4: "dynamic4"}
"""State format by ``optim_bits``."""
_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def has_codes(state_format: str) -> bool:
    """Return whether a moment is kept as codes and scales, rather than as float values."""
    return state_format not in _FLOATS


def scale_count(numel: int, block_size: int) -> int:
    """Return the number of blocks of a tensor; the last may be short."""
    return -(-numel // block_size)


def nibble_bytes(numel: int) -> int:
    """Return the bytes of 4-bit codes."""
    return (numel + 1) // 2


def allocate(param: Tensor, state_format: str, block_size: int) -> tuple[Tensor, Tensor | None]:
    """Return a moment of zeros for a (local) parameter: values or codes, and float32 ``[blocks]`` scales or None.

    Values and 8-bit codes have the shape and strides of ``param``, 4-bit codes are uint8 ``[ceil(numel / 2)]``. The memory is
    touched here, so that the first step is as fast as the others.
    """
    numel = param.numel()
    if not has_codes(state_format):
        return torch.empty_like(param, dtype=_FLOATS[state_format], requires_grad=False).zero_(), None
    if state_format == "dynamic4":
        codes = torch.empty(nibble_bytes(numel), dtype=torch.uint8, device=param.device)
    else:
        codes = torch.empty_like(param, dtype=torch.uint8, requires_grad=False)
    return codes.zero_(), torch.empty(scale_count(numel, block_size), device=param.device).zero_()


def encode(values: Tensor, state_format: str, is_signed: bool, block_size: int) -> tuple[Tensor, Tensor | None]:
    """Return codes and scales (or the cast values and None) of a moment given in floating point."""
    moment, scale = allocate(values, state_format, block_size)
    if scale is None:
        return moment.copy_(values), None
    as_float = torch.empty_like(moment, dtype=torch.float32) if state_format != "dynamic4" else torch.empty_like(values, dtype=torch.float32)
    _C.encode_state(as_float.copy_(values), _C.STATE_FORMATS[state_format], is_signed, block_size, moment, scale)
    return moment, scale


def decode(moment: Tensor, scale: Tensor | None, like: Tensor, state_format: str, is_signed: bool, block_size: int) -> Tensor:
    """Return a moment as float32 in the shape and strides of the parameter ``like``."""
    values = torch.empty_like(like, dtype=torch.float32, requires_grad=False)
    if scale is None:
        return values.copy_(moment)
    _C.decode_state(moment, scale, _C.STATE_FORMATS[state_format], is_signed, block_size, values)
    return values
