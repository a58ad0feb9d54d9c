# SPDX-License-Identifier: Apache-2.0
"""GGUF's block types: which weight format has their codes, and their packing by the library.

Some numbers are stored in another form. A scale that is a product (``d`` times 6 bits in K types) is rounded to a
float16 fraction of the row's power of two. A minimum becomes a float16 zero point, ``-minimum / scale``. So each weight
is within 2^-11 of |w| + |minimum| of its value in GGUF; types without products and minimums are exact. The levels of IQ4
are integers; they are stored exactly, as int8, in twice the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit import _C
from lowbit.formats.spec import LinearSpec, StoredWeight
from lowbit.quant.codes import pack_mxfp4
from lowbit.quant.layout import repack_weight


@dataclass(frozen=True, slots=True)
class BlockType:
    """How one GGUF block type is stored in lowbit."""

    format: str
    group_size: int
    weights: int
    """The number of weights in a block."""
    asymmetric: bool = False
    products: bool = False
    """Whether a scale is a product of two numbers of the block; else it is a float16, kept as it is."""
    number: int | None = None
    """The number of the type in `_C.GGUF_TYPES`; None: MXFP4, whose blocks `_C.pack_mxfp4` packs."""

    def spec(self, activations: str) -> LinearSpec:
        """Return the weight format with "int8_group" or "float" activations."""
        mapping = "asymmetric" if self.asymmetric else "symmetric"
        return LinearSpec(self.format, self.group_size, self.asymmetric, activations, mapping)


BLOCK_TYPES = {name: BlockType(**facts) for name, facts in _C.GGUF_TYPES.items()} | {"MXFP4": BlockType("fp4_e2m1", 32, 32)}
FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


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
    order = None if columns is None else order_of_groups(columns, type.group_size)
    if type.number is None:
        blocks = blocks if order is None else blocks[:, order]
        return pack_mxfp4(blocks[..., 1:], blocks[..., 0], layout, halves=True)
    n, k = len(blocks), blocks.shape[1] * type.weights
    stored = StoredWeight(type.spec("float"), n, k, _C.LAYOUT)
    packed = torch.empty(stored.shape, dtype=torch.uint8, device="cpu")
    places = None if order is None else order.argsort().int()
    _C.pack_gguf(blocks, type.number, places, packed)
    return repack_weight(packed, stored, layout)


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
