# SPDX-License-Identifier: Apache-2.0
"""Moments in memory: layout, allocation, encoding and decoding. docs/ops/optim.md describes the codes."""

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
    """Return whether a moment is stored as codes and scales instead of float values."""
    return state_format not in _FLOATS


def scale_count(numel: int, block_size: int) -> int:
    """Return the number of blocks of a tensor; the last block may be shorter."""
    return -(-numel // block_size)


def nibble_bytes(numel: int) -> int:
    """Return the size of 4-bit codes in bytes."""
    return (numel + 1) // 2


@dataclass(frozen=True, slots=True)
class Layout:
    """The memory layout of the moments of one (local) parameter. A block consists of elements that are consecutive in
    memory.

    ``stride`` is that of a dense tensor in the memory order of the parameter, with 0 in dimensions of size 1; None if
    it is row-major. ``block_size`` is 0 if there are no scales.
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
        """Return an uninitialized tensor with the parameter's shape and memory order."""
        if self.stride is None:
            return torch.empty(self.shape, dtype=dtype, device=self.device)
        return torch.empty_strided(self.shape, self.stride, dtype=dtype, device=self.device)

    def __str__(self) -> str:
        order = "" if self.stride is None else f", strides {list(self.stride)}"
        return self.state_format + (f" in blocks of {self.block_size}" if self.block_size else "") + order


def allocate(layout: Layout) -> tuple[Tensor, Tensor | None]:
    """Return a moment of zeros: values or codes, and scales float32 ``[blocks]`` or None.

    Values and 8-bit codes have the shape and memory order of the parameter; 4-bit codes are uint8
    ``[ceil(numel / 2)]``. The memory is written here, so that the first step is as fast as the others.
    """
    if layout.state_format == "dynamic4":
        moment = torch.empty(nibble_bytes(layout.numel), dtype=torch.uint8, device=layout.device)
    else:
        moment = layout.empty(layout.dtype)
    scale = torch.zeros(layout.scales, dtype=torch.float32, device=layout.device) if layout.block_size else None
    return moment.zero_(), scale


def encode(values: Tensor, layout: Layout, is_signed: bool) -> tuple[Tensor, Tensor | None]:
    """Return codes and scales (or cast values and None) for a floating-point moment in any memory order."""
    moment, scale = allocate(layout)
    if scale is None:
        return moment.copy_(values), None
    ordered = layout.empty(torch.float32).copy_(values)
    _C.encode_state(ordered, _C.STATE_FORMATS[layout.state_format], is_signed, layout.block_size, moment, scale)
    return moment, scale


def decode(moment: Tensor, scale: Tensor | None, layout: Layout, is_signed: bool) -> Tensor:
    """Return a moment, stored with this layout, as float32 with the parameter's shape."""
    values = layout.empty(torch.float32)
    if scale is None:
        return values.copy_(moment)
    _C.decode_state(moment, scale, _C.STATE_FORMATS[layout.state_format], is_signed, layout.block_size, values)
    return values
