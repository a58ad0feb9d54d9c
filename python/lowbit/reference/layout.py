# SPDX-License-Identifier: Apache-2.0
"""The packed layout "x86-panel-16x64", version 1: the bytes of a weight as they are stored, on every machine.

uint8 [panels, panel_bytes]; a panel is 16 output columns over all k; n is padded to 16, k to 64. Sections of a panel, each
padded to 64 bytes:
    column_scale float32 [16] | column_sum float32 [16] | group_scale float16 [groups, 16] | zero float16 [groups, 16] | codes
column_sum is the sum over k of the decoded column. Absent: group_scale per channel, zero when symmetric, all but the codes for
float formats. Codes are tiles of 64 k; inside a tile, rows of 64 bytes:
    int8      16 rows  [16 columns, 4 k]
    int4       8 rows  [16 columns, 4 k], low nibble k 0..31 of the tile, high nibble k 32..63
    float32   64 rows  [16 columns]
    float16   64 half rows [16 columns]
    bfloat16  32 rows  [16 columns, 2 k]
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.reference.quantize import BITS, FLOAT_DTYPES, QuantizedWeight

COLUMNS, TILE = 16, 64


def pack(weight: QuantizedWeight) -> Tensor:
    """Lay out a quantized weight as panels."""
    sections = [
        _per_column(weight.column_scale),
        _per_column(weight.decode().sum(1).float()),
        _per_group(weight.group_scale),
        _per_group(weight.zero),
        _codes(_padded_codes(weight), weight.format),
    ]
    return torch.cat([section.flatten(1) for section in sections if section is not None], dim=1)


def pack_float(weight: Tensor) -> Tensor:
    """Lay out a float32, bfloat16 or float16 weight ``[n, k]`` as panels."""
    format = next(name for name, dtype in FLOAT_DTYPES.items() if dtype == weight.dtype)
    return _codes(_pad(weight), format).flatten(1)


def unpack(packed: Tensor, n: int, k: int, format: str, group_size: int, asymmetric: bool) -> QuantizedWeight:
    """Read panels back; the inverse of :func:`pack`."""
    groups = -(-k // group_size) if group_size else 1
    section = -(-groups * COLUMNS * 2 // 64) * 64
    at = 0

    def take(size: int) -> Tensor:
        nonlocal at
        at += size
        return packed[:, at - size : at].contiguous()

    def take_per_group() -> Tensor:
        values = take(section).view(torch.float16)[:, : groups * COLUMNS].reshape(-1, groups, COLUMNS)
        return values.transpose(1, 2).reshape(-1, groups)[:n]

    column_scale = take(64).view(torch.float32).reshape(-1)[:n]
    take(64)  # column_sum follows from the rest
    group_scale = take_per_group() if group_size else None
    zero = take_per_group() if asymmetric else None
    codes = _plain(packed[:, at:].contiguous(), format)[:n, :k].contiguous()
    return QuantizedWeight(format, group_size, codes, column_scale, group_scale, zero)


def unpack_float(packed: Tensor, n: int, k: int, format: str) -> Tensor:
    """Read the panels of a float format back, ``[n, k]``."""
    return _plain(packed, format)[:n, :k].contiguous()


def _pad(matrix: Tensor) -> Tensor:
    n, k = matrix.shape
    return torch.nn.functional.pad(matrix, (0, -k % TILE, 0, -n % COLUMNS))


def _padded_codes(weight: QuantizedWeight) -> Tensor:
    """Padding decodes to zero: its codes are the zero point of their group, and 0 where no group reaches."""
    n, k = weight.codes.shape
    rows, columns = n + -n % COLUMNS, k + -k % TILE
    fixed = 0.0 if weight.zero is not None else 2.0 ** (BITS[weight.format] - 1)
    zero = weight.scale.new_full((rows, weight.scale.shape[1]), fixed)
    zero[:n] = weight.zero_or_symmetric
    spread = zero.repeat_interleave(weight.group_size or columns, dim=1)[:, :columns]
    codes = torch.nn.functional.pad(spread, (0, columns - spread.shape[1])).byte()
    codes[:n, :k] = weight.codes
    return codes


def _per_column(values: Tensor) -> Tensor:
    return _pad_rows(values).view(-1, COLUMNS).view(torch.uint8)


def _per_group(values: Tensor | None) -> Tensor | None:
    if values is None:
        return None
    panels = _pad_rows(values).view(-1, COLUMNS, values.shape[1]).transpose(1, 2).flatten(1).contiguous().view(torch.uint8)
    return torch.nn.functional.pad(panels, (0, -panels.shape[1] % 64))


def _pad_rows(values: Tensor) -> Tensor:
    padding = values.new_zeros((-len(values) % COLUMNS, *values.shape[1:]))
    return torch.cat([values, padding])


def _codes(codes: Tensor, format: str) -> Tensor:
    panels, tiles = codes.shape[0] // COLUMNS, codes.shape[1] // TILE
    if format == "int4":
        low, high = codes.view(panels, COLUMNS, tiles, 2, TILE // 2).unbind(3)
        return (low | high << 4).view(panels, COLUMNS, tiles, 8, 4).permute(0, 2, 3, 1, 4).reshape(panels, -1)
    together = {"int8": 4, "bfloat16": 2}.get(format, 1)  # consecutive k of one column
    tiled = codes.view(panels, COLUMNS, tiles * TILE // together, together)
    return tiled.transpose(1, 2).reshape(panels, -1).view(torch.uint8)


def _plain(packed: Tensor, format: str) -> Tensor:
    panels = packed.shape[0]
    if format == "int4":
        rows = packed.view(panels, -1, 8, COLUMNS, 4).permute(0, 3, 1, 2, 4).reshape(panels, COLUMNS, -1, 1, TILE // 2)
        return torch.cat([rows & 15, rows >> 4], dim=3).view(panels * COLUMNS, -1)
    together = {"int8": 4, "bfloat16": 2}.get(format, 1)
    values = packed if format == "int8" else packed.view(FLOAT_DTYPES[format])
    return values.view(panels, -1, COLUMNS, together).transpose(1, 2).reshape(panels * COLUMNS, -1)
