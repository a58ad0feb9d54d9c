# SPDX-License-Identifier: Apache-2.0
"""Moments in memory: their layout, allocate, encode, decode. docs/ops/optim.md has the meaning of codes."""

from __future__ import annotations

import math
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Layout:
    """How the moments of one (local) parameter lie in memory: blocks are of elements that follow each other there.

    ``stride`` is that of a dense tensor in the order of the parameter, None if it is row by row, and 0 in dimensions
    of size 1.
    ``block_size`` is 0 where there are no scales.
    """

    state_format: str
    block_size: int
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    device: torch.device = torch.device("cpu")

    @classmethod
    def of(cls, tensor: Tensor, state_format: str, block_size: int) -> Layout:
        """Return the layout of moments in the memory order of ``tensor``, which may have gaps."""
        stride = None
        if not tensor.is_contiguous() and not (dense := torch.empty_like(tensor, device="meta")).is_contiguous():
            stride = tuple(0 if size == 1 else step for size, step in zip(tensor.shape, dense.stride(), strict=True))
        return cls(
            state_format, block_size if has_codes(state_format) else 0, tuple(tensor.shape), stride, tensor.device
        )

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of values or codes."""
        return _FLOATS.get(self.state_format, torch.uint8)

    @property
    def scales(self) -> int:
        """The number of scales."""
        return scale_count(self.numel, self.block_size) if self.block_size else 0

    def empty(self, dtype: torch.dtype) -> Tensor:
        """Return a tensor of the parameter's shape in its memory order."""
        if self.stride is None:
            return torch.empty(self.shape, dtype=dtype, device=self.device)
        return torch.empty_strided(self.shape, self.stride, dtype=dtype, device=self.device)

    def __str__(self) -> str:
        order = "" if self.stride is None else f", strides {list(self.stride)}"
        return self.state_format + (f" in blocks of {self.block_size}" if self.block_size else "") + order


def allocate(layout: Layout) -> tuple[Tensor, Tensor | None]:
    """Return a moment of zeros: values or codes, and float32 ``[blocks]`` scales or None.

    Values and 8-bit codes have the shape and order of the parameter, 4-bit codes are uint8 ``[ceil(numel / 2)]``. The
    memory is touched here, so that the first step is as fast as the others.
    """
    if layout.state_format == "dynamic4":
        moment = torch.empty(nibble_bytes(layout.numel), dtype=torch.uint8, device=layout.device)
    else:
        moment = layout.empty(layout.dtype)
    scale = torch.zeros(layout.scales, dtype=torch.float32, device=layout.device) if layout.block_size else None
    return moment.zero_(), scale


def encode(values: Tensor, layout: Layout, is_signed: bool) -> tuple[Tensor, Tensor | None]:
    """Return codes and scales (or the cast values and None) of a moment given in floating point, in
    any memory order."""
    moment, scale = allocate(layout)
    if scale is None:
        return moment.copy_(values), None
    ordered = layout.empty(torch.float32).copy_(values)
    _C.encode_state(ordered, _C.STATE_FORMATS[layout.state_format], is_signed, layout.block_size, moment, scale)
    return moment, scale


def decode(moment: Tensor, scale: Tensor | None, layout: Layout, is_signed: bool) -> Tensor:
    """Return a moment that lies in memory as ``layout`` says as float32 of the parameter's shape."""
    values = layout.empty(torch.float32)
    if scale is None:
        return values.copy_(moment)
    _C.decode_state(moment, scale, _C.STATE_FORMATS[layout.state_format], is_signed, layout.block_size, values)
    return values
