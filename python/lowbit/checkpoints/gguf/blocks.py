# SPDX-License-Identifier: Apache-2.0
"""GGUF's block types as codes, scales and zero points: ``w = scale * (code - zero)``.

Each type is read into the format that has its codes. Some numbers are stored in another form. A scale that is a product
(``d`` times 6 bits in K types) is rounded to a float16 fraction of the row's power of two. A minimum becomes a float16
zero point, ``-minimum / scale``. So each weight is within 2^-11 of |w| + |minimum| of its value in GGUF; types without
products and minimums are exact. The levels of IQ4 are integers; they are stored exactly, as int8, in twice the bytes.
Blocks of MXFP4 are packed by the library, as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowbit import _C
from lowbit.formats.spec import LinearSpec
from lowbit.quant.codes import CodedWeight, pack_mxfp4, split_scale

_IQ4 = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int16)
_FAR = 65504.0
"""The largest float16. A group whose zero point would be larger is stored as its minimum alone: all codes are 1 and the
scale is the minimum. Its codes contribute less than 2^-11 of the minimum."""


@dataclass(slots=True)
class Groups:
    """The numbers in blocks ``[n, blocks, bytes]``: ``w = scale * code + minimum``."""

    codes: Tensor
    """uint8 ``[n, blocks, weights per block]``."""
    scale: Tensor
    """float32 ``[n, blocks, groups per block]``."""
    minimum: Tensor | None = None
    """float32 like ``scale``, or None if ``w = scale * (code - zero)`` with the zero of the symmetric format."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """How one GGUF block type is stored in lowbit."""

    format: str
    group_size: int
    read: Callable[[Tensor], Groups] | None
    """The numbers in blocks; None: `_C.pack_mxfp4` packs them."""
    scales: str = "float16"
    """The kind of scales: "float16" numbers, kept as they are, or products of two numbers of the block ("product")."""
    asymmetric: bool = False

    def spec(self, activations: str) -> LinearSpec:
        """Return the weight format with "int8_group" or "float" activations."""
        mapping = "asymmetric" if self.asymmetric else "symmetric"
        return LinearSpec(self.format, self.group_size, self.asymmetric, activations, mapping)


def pack_blocks(blocks: Tensor, type: BlockType, layout: str = _C.LAYOUT, columns: Tensor | None = None) -> Tensor:
    """Return the packed weight of blocks, uint8 ``[n, blocks, bytes]``.

    Args:
        blocks: the blocks of n rows.
        type: their type.
        layout: the layout of the packed weight.
        columns: int64 ``[k]``, the column of the blocks for each column of the weight, in whole groups; None for the
            same order.

    Raises:
        ValueError: a scale or a minimum is inf or nan, the scales of a row differ by more than 2^24, or a group is
            divided.
    """
    if type.read is None:
        blocks = blocks if columns is None else blocks[:, order_of_groups(columns, type.group_size)]
        return pack_mxfp4(blocks[..., 1:], blocks[..., 0], layout, halves=True)
    read = type.read(blocks)
    for name, values in (("scale", read.scale), ("minimum", read.minimum)):
        if values is not None and not values.isfinite().all():
            raise ValueError(f"every {name} must be finite, got inf or nan")
    codes, scale = read.codes.flatten(1), read.scale.flatten(1)
    minimum, zero = None if read.minimum is None else read.minimum.flatten(1), None
    if columns is not None:
        codes, groups = codes[:, columns], order_of_groups(columns, type.group_size)
        scale, minimum = scale[:, groups], None if minimum is None else minimum[:, groups]
    if minimum is not None:
        constant = minimum.abs() > _FAR * _stored(codes, scale, type).scale.abs()
        codes = torch.where(constant.repeat_interleave(type.group_size, dim=1), 1, codes)
        scale = torch.where(constant, minimum, scale)
        divisor = _stored(codes, scale, type).scale
        zero = torch.where(constant | (minimum == 0), 0.0, -minimum / divisor).half()
        if not zero.isfinite().all():
            raise ValueError("the scales of a row must lie within 2^24 of its largest")
    return replace(_stored(codes, scale, type), zero=zero).pack(layout)


def order_of_groups(columns: Tensor, group_size: int) -> Tensor:
    """Return the order of the groups of columns that are in this order.

    Raises:
        ValueError: the columns of a group do not stay together.
    """
    groups = columns.view(-1, group_size)
    first = groups[:, :1]
    if (first % group_size).any() or not torch.equal(groups, first + torch.arange(group_size)):
        raise ValueError(f"columns must move in whole groups of {group_size}")
    return first[:, 0] // group_size


def _stored(codes: Tensor, scale: Tensor, type: BlockType) -> CodedWeight:
    """Return the codes with scales in their stored form. float16 scales are kept exactly, subnormals included; others
    become fractions of the row's largest."""
    as_it_is = type.scales == "float16"
    parts = (torch.ones(len(scale)), scale.half()) if as_it_is else split_scale(scale, type.group_size)
    return CodedWeight(type.spec("float"), codes, *parts, None)


# ---- reading -------------------------------------------------------------------------------------------------------


def _halves(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 at byte ``at`` of each block, as float32 ``[n, blocks, 1]``."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _shifted(values: Tensor, shifts: tuple[int, ...], count: int, mask: int) -> Tensor:
    """Return the bits at each of ``shifts``, for groups of ``count`` bytes: ``[n, blocks, ..., shifts, count]``."""
    steps = torch.tensor(shifts, dtype=torch.uint8)[:, None]
    return values.unflatten(-1, (-1, 1, count)) >> steps & mask


def _nibbles(values: Tensor, count: int) -> Tensor:
    return _shifted(values, (0, 4), count, 15).flatten(2)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """Return the 32 bits in 4 bytes, as ``[n, blocks, 32]``."""
    return (
        blocks[..., at : at + 4, None]
        .expand(-1, -1, -1, 8)
        .bitwise_right_shift(torch.arange(8, dtype=torch.uint8))
        .bitwise_and(1)
        .flatten(2)
    )


def _q4_0(blocks: Tensor) -> Groups:
    return Groups(_nibbles(blocks[..., 2:], 16), _halves(blocks, 0))


def _q4_1(blocks: Tensor) -> Groups:
    return Groups(_nibbles(blocks[..., 4:], 16), _halves(blocks, 0), _halves(blocks, 2))


def _q5_0(blocks: Tensor) -> Groups:
    return Groups(_nibbles(blocks[..., 6:], 16) | _fifth_bits(blocks, 2) << 4, _halves(blocks, 0))


def _q5_1(blocks: Tensor) -> Groups:
    codes = _nibbles(blocks[..., 8:], 16) | _fifth_bits(blocks, 4) << 4
    return Groups(codes, _halves(blocks, 0), _halves(blocks, 2))


def _q8_0(blocks: Tensor) -> Groups:
    return Groups(blocks[..., 2:] ^ 128, _halves(blocks, 0))


def _q2_k(blocks: Tensor) -> Groups:
    codes = _shifted(blocks[..., 16:80], (0, 2, 4, 6), 32, 3).flatten(2)
    scales = blocks[..., :16]
    return Groups(codes, _halves(blocks, 80) * (scales & 15), -_halves(blocks, 82) * (scales >> 4))


def _q3_k(blocks: Tensor) -> Groups:
    low = _shifted(blocks[..., 32:96], (0, 2, 4, 6), 32, 3).flatten(2)
    high = _shifted(blocks[..., :32], tuple(range(8)), 32, 1).flatten(2)
    scales = _nibbles(blocks[..., 96:104], 8) | _shifted(blocks[..., 104:108], (0, 2, 4, 6), 4, 3).flatten(2) << 4
    return Groups(low | high << 2, _halves(blocks, 108) * (scales.float() - 32))


def _six_bits(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 8 scales and 8 minimums of a Q4_K or Q5_K block, stored in 12 bytes."""
    first, second, both = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scale = torch.cat([first & 63, both & 15 | first >> 2 & 48], dim=-1)
    minimum = torch.cat([second & 63, both >> 4 | second >> 2 & 48], dim=-1)
    return _halves(blocks, 0) * scale, -_halves(blocks, 2) * minimum


def _q4_k(blocks: Tensor) -> Groups:
    return Groups(_nibbles(blocks[..., 16:], 32), *_six_bits(blocks))


def _q5_k(blocks: Tensor) -> Groups:
    high = _shifted(blocks[..., 16:48], tuple(range(8)), 32, 1).flatten(2)
    return Groups(_nibbles(blocks[..., 48:], 32) | high << 4, *_six_bits(blocks))


def _q6_k(blocks: Tensor) -> Groups:
    high = _shifted(blocks[..., 128:192], (0, 2, 4, 6), 32, 3).flatten(2)
    scale = _halves(blocks, 208) * blocks[..., 192:208].contiguous().view(torch.int8)
    return Groups(_nibbles(blocks[..., :128], 64) | high << 4, scale)


def _iq4_codes(values: Tensor) -> Tensor:
    return (_IQ4 + 128).byte()[_nibbles(values, 16).int()]


def _iq4_nl(blocks: Tensor) -> Groups:
    return Groups(_iq4_codes(blocks[..., 2:]), _halves(blocks, 0))


def _iq4_xs(blocks: Tensor) -> Groups:
    low = blocks[..., 4:8, None].expand(-1, -1, -1, 2) >> torch.tensor([0, 4], dtype=torch.uint8) & 15
    high = blocks[..., 2:4, None].expand(-1, -1, -1, 4) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3
    scales = (low.flatten(2) | high.flatten(2) << 4).float() - 32
    return Groups(_iq4_codes(blocks[..., 8:]), _halves(blocks, 0) * scales)


BLOCK_TYPES = {
    "Q4_0": BlockType("int4", 32, _q4_0),
    "Q4_1": BlockType("int4", 32, _q4_1, asymmetric=True),
    "Q5_0": BlockType("int5", 32, _q5_0),
    "Q5_1": BlockType("int5", 32, _q5_1, asymmetric=True),
    "Q8_0": BlockType("int8", 32, _q8_0),
    "Q2_K": BlockType("int2", 16, _q2_k, "product", asymmetric=True),
    "Q3_K": BlockType("int3", 16, _q3_k, "product"),
    "Q4_K": BlockType("int4", 32, _q4_k, "product", asymmetric=True),
    "Q5_K": BlockType("int5", 32, _q5_k, "product", asymmetric=True),
    "Q6_K": BlockType("int6", 16, _q6_k, "product"),
    "IQ4_NL": BlockType("int8", 32, _iq4_nl),
    "IQ4_XS": BlockType("int8", 32, _iq4_xs, "product"),
    "MXFP4": BlockType("fp4_e2m1", 32, None),
}
FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
