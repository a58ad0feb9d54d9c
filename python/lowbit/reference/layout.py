# SPDX-License-Identifier: Apache-2.0
"""The layouts of a packed weight, byte for byte: "x86-panel-16x64", which the kernels read, and "row-major".

x86-panel-16x64: uint8 [panels, panel_bytes]; a panel has 16 output columns over all k; n is padded to 16, k to 64. The
sections of a panel, each padded to 64 bytes:
    column_scale float32 [16] | column_sum float32 [16] | group_scale float16 [groups, 16] | zero float16 [groups, 16] |
    codes
column_sum is the sum over k of the decoded column. Absent sections: group_scale per channel; zero in symmetric formats;
all but the codes in float formats. Codes are tiles of 64 k. A code of 1 to 8 bits is split from its lowest bits on into
pieces of 1, 2, 4 and 8 bits, which add up to its number of bits. Each piece has a plane in the tile, in this order, of
rows of 64 bytes:
    8 bits    16 rows  [16 columns, 4 k]
    4 bits     8 rows  [16 columns, 4 k], low nibble k 0..31 of the tile, high nibble k 32..63
    2 bits     4 rows  [16 columns, 4 k], of k 0..15 in the lowest two bits, of k 48..63 in the highest
    1 bit      2 rows  [16 columns, 4 k], of k 0..7 in the lowest bit, of k 56..63 in the highest
int8_semi_sparse omits the codes of 0 (128): every four k have two slots, filled in the order of k, with code - 128 and
the position in the four. Both are 0 in an empty slot. A tile has
    positions  2 rows  [16 columns, 4 slots], 2 bits, of slots 0..7 in the lowest ones, of slots 24..31 in the highest
    codes      8 rows  [16 columns, 4 slots]
and for float formats
    float32   64 rows  [16 columns]
    float16   64 half rows [16 columns]
    bfloat16  32 rows  [16 columns, 2 k]

row-major: uint8 [n, row_bytes], each row of the weight by itself, its sections padded to 16 bytes, with no other
padding:
    column_scale float32 | group_scale float16 [groups] | zero float16 [groups] | codes [k]
The same sections are absent. Codes are contiguous bit by bit, from the lowest bit of a byte on; int8_semi_sparse omits
none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.reference.quantize import SEMI_SPARSE, QuantizedWeight, bits_of, code_of_zero, float_dtype

COLUMNS, TILE = 16, 64  # columns of a panel, k of a tile
ROW_ALIGN = 16


def pack(weight: QuantizedWeight) -> Tensor:
    """Pack a quantized weight into panels."""
    sections = [
        _per_column(weight.column_scale),
        _per_column(weight.decode().sum(1).float()),
        _per_group(weight.group_scale),
        _per_group(weight.zero),
        _codes(_padded_codes(weight), weight.format),
    ]
    return torch.cat([section.flatten(1) for section in sections if section is not None], dim=1)


def pack_float(weight: Tensor) -> Tensor:
    """Pack a float32, bfloat16 or float16 weight ``[n, k]`` into panels."""
    return _codes(_pad(weight), str(weight.dtype).removeprefix("torch.")).flatten(1)


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


def row_major(weight: QuantizedWeight) -> Tensor:
    """Pack a quantized weight row by row."""
    sections = (weight.column_scale[:, None], weight.group_scale, weight.zero, _stream(weight.codes, weight.format))
    return torch.cat([_row_section(section) for section in sections if section is not None], dim=1)


def row_major_float(weight: Tensor) -> Tensor:
    """Pack a float weight ``[n, k]`` row by row."""
    return _row_section(weight)


def from_row_major(packed: Tensor, k: int, format: str, group_size: int, asymmetric: bool) -> QuantizedWeight:
    """Read rows back; the inverse of :func:`row_major`."""
    groups = -(-k // group_size) if group_size else 1
    at = 0

    def take(dtype: torch.dtype, count: int) -> Tensor:
        nonlocal at
        size = count * dtype.itemsize
        section, at = packed[:, at : at + size].contiguous(), at + size + -size % ROW_ALIGN
        return section.view(dtype)

    column_scale = take(torch.float32, 1)[:, 0]
    group_scale = take(torch.float16, groups) if group_size else None
    zero = take(torch.float16, groups) if asymmetric else None
    codes = _from_stream(take(torch.uint8, -(-k * bits_of(format) // 8)), k, format)
    return QuantizedWeight(format, group_size, codes, column_scale, group_scale, zero)


def _row_section(values: Tensor) -> Tensor:
    # clone, because a dimension of size 1 may have any stride.
    rows = values.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % ROW_ALIGN))


def _stream(codes: Tensor, format: str) -> Tensor:
    bits, (n, k) = bits_of(format), codes.shape
    if bits == 8:
        return codes
    eights = torch.nn.functional.pad(codes, (0, -k % 8)).view(n, -1, 8)
    words = sum(eights[:, :, i].long() << bits * i for i in range(8))
    stream = torch.stack([(words >> 8 * i & 255).byte() for i in range(bits)], dim=2)
    return stream.flatten(1)[:, : -(-k * bits // 8)]


def _from_stream(stream: Tensor, k: int, format: str) -> Tensor:
    bits, n = bits_of(format), stream.shape[0]
    if bits == 8:
        return stream
    parts = torch.nn.functional.pad(stream, (0, -stream.shape[1] % bits)).view(n, -1, bits)
    words = sum(parts[:, :, i].long() << 8 * i for i in range(bits))
    codes = torch.stack([(words >> bits * i & 2**bits - 1).byte() for i in range(8)], dim=2)
    return codes.flatten(1)[:, :k].contiguous()


def _pad(matrix: Tensor) -> Tensor:
    n, k = matrix.shape
    padded = matrix.new_zeros(n + -n % COLUMNS, k + -k % TILE)
    padded[:n, :k] = matrix
    return padded


def _padded_codes(weight: QuantizedWeight) -> Tensor:
    """Return the codes with padding that decodes to zero: the zero point of its group, or 0 beyond the last group."""
    n, k = weight.codes.shape
    rows, columns = n + -n % COLUMNS, k + -k % TILE
    fixed = 0 if weight.zero is not None else code_of_zero(weight.format)
    zero = weight.scale.new_full((rows, weight.scale.shape[1]), fixed)
    if weight.zero is not None:
        zero[:n] = weight.zero.float()
    spread = zero.repeat_interleave(weight.group_size or columns, dim=1)[:, :columns]
    beyond = fixed if weight.format == SEMI_SPARSE else 0
    codes = torch.nn.functional.pad(spread, (0, columns - spread.shape[1]), value=beyond).byte()
    codes[:n, :k] = weight.codes
    return codes


def _per_column(values: Tensor) -> Tensor:
    return _pad_rows(values).view(-1, COLUMNS).view(torch.uint8)


def _per_group(values: Tensor | None) -> Tensor | None:
    if values is None:
        return None
    panels = (
        _pad_rows(values).view(-1, COLUMNS, values.shape[1]).transpose(1, 2).flatten(1).contiguous().view(torch.uint8)
    )
    return torch.nn.functional.pad(panels, (0, -panels.shape[1] % 64))


def _pad_rows(values: Tensor) -> Tensor:
    padding = values.new_zeros((-len(values) % COLUMNS, *values.shape[1:]))
    return torch.cat([values, padding])


def _pieces(format: str) -> list[tuple[int, int]]:
    """Return the pieces of a code: the number of bits in each, and the number before it."""
    bits = bits_of(format)
    return [(count, bits & count - 1) for count in (1, 2, 4, 8) if bits & count]


def _codes(codes: Tensor, format: str) -> Tensor:
    panels, tiles = codes.shape[0] // COLUMNS, codes.shape[1] // TILE
    if float_dtype(format) is not None:
        together = 2 if format == "bfloat16" else 1  # consecutive k of one column
        tiled = codes.view(panels, COLUMNS, tiles * TILE // together, together)
        return tiled.transpose(1, 2).reshape(panels, -1).view(torch.uint8)
    if format == SEMI_SPARSE:
        return _slots(codes)
    planes = []
    for count, before in _pieces(format):
        parts = (codes >> before & 2**count - 1).view(panels, COLUMNS, tiles, 8 // count, 2 * count, 4)
        plane = sum(part << count * i for i, part in enumerate(parts.unbind(3)))
        planes.append(plane.permute(0, 2, 3, 1, 4).reshape(panels, tiles, -1))
    return torch.cat(planes, dim=2).flatten(1)


def _plain(packed: Tensor, format: str) -> Tensor:
    panels, dtype = packed.shape[0], float_dtype(format)
    if dtype is not None:
        values = packed.view(dtype).view(panels, -1, COLUMNS, 2 if format == "bfloat16" else 1)
        return values.transpose(1, 2).reshape(panels * COLUMNS, -1)
    if format == SEMI_SPARSE:
        return _from_slots(packed)
    tiles = packed.view(panels, -1, COLUMNS * TILE // 8 * bits_of(format))
    codes = packed.new_zeros(panels * COLUMNS, tiles.shape[1] * TILE)
    for count, before in _pieces(format):
        plane = tiles[:, :, 128 * before : 128 * (before + count)].reshape(panels, -1, 2 * count, COLUMNS, 4)
        rows = plane.permute(0, 3, 1, 2, 4)  # [panel, column, tile, row, 4]
        parts = torch.stack([rows >> count * i & 2**count - 1 for i in range(8 // count)], dim=3)
        codes |= parts.reshape(panels * COLUMNS, -1) << before
    return codes


def _slots(codes: Tensor) -> Tensor:
    """Return the tiles of 2:4 codes ``[16 panels, 64 tiles]``, as bytes ``[panels, bytes]``."""
    fours = codes.unflatten(1, (-1, 4))
    kept = fours != code_of_zero(SEMI_SPARSE)
    if kept.sum(2).max() > 2:
        raise ValueError("layout: codes must be 2:4")
    order = (~kept).byte().argsort(dim=2, stable=True)[:, :, :2]
    there = kept.gather(2, order)
    values = fours.gather(2, order) ^ 128
    by_step = [
        part.reshape(len(codes) // COLUMNS, COLUMNS, -1, 8, 4) for part in (values, torch.where(there, order, 0))
    ]
    values, positions = (part.permute(0, 2, 3, 1, 4) for part in by_step)  # [panel, tile, step, column, slot]
    rows = sum(positions[:, :, 2 * i : 2 * i + 2] << 2 * i for i in range(4)).byte()
    return torch.cat([rows.flatten(2), values.flatten(2)], dim=2).flatten(1)


def _from_slots(packed: Tensor) -> Tensor:
    """Read the tiles back; the inverse of `_slots`."""
    tiles = packed.view(len(packed), -1, 640)
    rows = tiles[:, :, :128].reshape(*tiles.shape[:2], 2, COLUMNS, 4)
    positions = torch.cat([rows >> 2 * i & 3 for i in range(4)], dim=2)
    values = tiles[:, :, 128:].reshape(*tiles.shape[:2], 8, COLUMNS, 4)
    by_step = values, positions
    values, positions = (part.permute(0, 3, 1, 2, 4).reshape(len(packed) * COLUMNS, -1, 2) for part in by_step)
    codes = values.new_full((*values.shape[:2], 4), code_of_zero(SEMI_SPARSE))
    for slot in range(2):
        value, position = values[:, :, slot : slot + 1], positions[:, :, slot : slot + 1].long()
        codes.scatter_(2, position, torch.where(value != 0, value ^ 128, codes.gather(2, position)))
    return codes.flatten(1)
