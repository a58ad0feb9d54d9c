# SPDX-License-Identifier: Apache-2.0
"""The codes, scales and zero points of a weight ``[n, k]``, and the packed weight that holds them.

    w[n, k] = column_scale[n] * group_scale[n, g] * (code[n, k] - zero[n, g]),    g = k // group_size

They are written and read in the "row-major" layout (csrc/formats/layout.hpp), which `_C.repack` converts to and from
every other layout. A row is uint8; each of its sections is padded to 16 bytes:
    column_scale float32 | group_scale float16 [groups] | zero float16 [groups] | codes [k]
A weight without groups has no group_scale, and a symmetric weight has no zero. Codes are stored as a stream of bits,
starting at the lowest bit of each byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit import _C
from lowbit.formats.spec import LinearSpec, StoredWeight
from lowbit.quant.layout import repack_weight

SMALLEST = 2.0**-126  # a smaller scale has no float32 inverse, so its group is stored as zeros
_SECTION = 16  # alignment of a section in bytes


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A quantized weight as codes, with scales and zero points in their storage dtypes."""

    spec: LinearSpec
    codes: Tensor  # uint8 [n, k]
    column_scale: Tensor  # float32 [n]
    group_scale: Tensor | None  # float16 [n, groups]; None: one scale per column
    zero: Tensor | None  # float16 [n, groups]; None: the weight is symmetric

    @classmethod
    def of(cls, codes: Tensor, scale: Tensor, zero: Tensor | None, spec: LinearSpec) -> CodedWeight:
        """Return a weight with codes ``[n, k]``, and scales and zero points ``[n, groups]`` float32, which are rounded
        to their storage dtypes."""
        half = None if zero is None else zero.half()
        return cls(spec, codes, *split_scale(scale, spec.group_size), half)

    @classmethod
    def unpack(cls, packed: Tensor, stored: StoredWeight) -> CodedWeight:
        """Return the codes, scales and zero points of a packed weight; the inverse of `pack`."""
        stream, *grid = _sections(packed, stored)
        return cls(stored.spec, codes_of(stream, stored.k, _C.FORMAT_FACTS[stored.spec.format]["bits"]), *grid)

    def rows(self, at: slice | Tensor) -> CodedWeight:
        """Return the weight of some of the rows, or of all in another order."""
        parts = self.codes, self.column_scale, self.group_scale, self.zero
        return CodedWeight(self.spec, *(part if part is None else part[at] for part in parts))

    def pack(self, layout: str = _C.LAYOUT) -> Tensor:
        """Return the packed weight in this layout."""
        stream = bit_stream(self.codes, _C.FORMAT_FACTS[self.spec.format]["bits"])
        stored = StoredWeight(self.spec, *self.codes.shape, layout)
        return pack_stream(stream, self.column_scale, self.group_scale, self.zero, stored)

    @property
    def scale(self) -> Tensor:
        """The product of column scale and group scale, float32 ``[n, groups]``."""
        return _joined_scale(self.column_scale, self.group_scale)

    @property
    def zero_point(self) -> Tensor:
        """The zero points, float32 ``[n, groups]``; for a symmetric weight, the constant of its format."""
        return _zero_point(self.zero, self.scale, self.spec)


def grid_of(packed: Tensor, stored: StoredWeight) -> tuple[Tensor, Tensor]:
    """Return the scales and zero points of a packed weight, float32 ``[n, groups]``, without reading its codes."""
    _, column_scale, group_scale, zero = _sections(packed, stored)
    scale = _joined_scale(column_scale, group_scale)
    return scale, _zero_point(zero, scale, stored.spec)


def _sections(packed: Tensor, stored: StoredWeight) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the stream of codes, the column scales, group scales and zero points of a packed weight."""
    spec, k = stored.spec, stored.k
    rows, begin, sections = repack_weight(packed, stored, "row-major"), 0, []
    per_group, code_bytes = 2 * spec.groups(k), -(-k * _C.FORMAT_FACTS[spec.format]["bits"] // 8)
    for size in (4, per_group * bool(spec.group_size), per_group * spec.asymmetric, code_bytes):
        sections.append(rows[:, begin : begin + size])
        begin += size + -size % _SECTION
    column_scale, group_scale, zero, stream = sections
    return (
        stream.contiguous(),
        column_scale.contiguous().view(torch.float32)[:, 0],
        group_scale.contiguous().view(torch.float16) if spec.group_size else None,
        zero.contiguous().view(torch.float16) if spec.asymmetric else None,
    )


def _joined_scale(column_scale: Tensor, group_scale: Tensor | None) -> Tensor:
    column = column_scale[:, None]
    return column if group_scale is None else column * group_scale.float()


def _zero_point(zero: Tensor | None, scale: Tensor, spec: LinearSpec) -> Tensor:
    return torch.full_like(scale, _C.FORMAT_FACTS[spec.format]["zero"]) if zero is None else zero.float()


def pack_stream(
    stream: Tensor, column_scale: Tensor, group_scale: Tensor | None, zero: Tensor | None, stored: StoredWeight
) -> Tensor:
    """Return the packed weight of codes that are a `bit_stream` already, with the other parts of a `CodedWeight`."""
    sections = (column_scale[:, None], group_scale, zero, stream)
    rows = torch.cat([_section(values) for values in sections if values is not None], dim=1)
    return repack_weight(rows, stored.in_layout("row-major"), stored.layout)


MXFP4_RANGE = 24
"""The smallest positive float16 is 2 ** -24: a group scale is a float16 fraction of its row's largest."""


def mxfp4_scales_fit(scales: Tensor) -> bool:
    """Whether scales of MXFP4, uint8 ``[..., groups]``, have no 255 (nan) and are within 2 ** `MXFP4_RANGE` of the
    largest of their row, 2 ** -126 or more."""
    least, most = scales.amin(-1).int(), scales.amax(-1).int()
    return not ((most == 255).any() or (least < most.clamp(min=MXFP4_RANGE + 1) - MXFP4_RANGE).any())


def pack_mxfp4(
    codes: Tensor, scales: Tensor, layout: str = _C.LAYOUT, *, halves: bool = False, rows: Tensor | None = None
) -> Tensor:
    """Return the packed weight of blocks of MXFP4: fp4_e2m1 in groups of 32.

    Args:
        codes: uint8 ``[n, k / 32, 16]``, or ``[experts, n, k / 32, 16]``: two codes in a byte. Rows and blocks may lie
            apart.
        scales: uint8 ``[n, k / 32]`` or ``[experts, n, k / 32]``, e8m0: 2 ** (scale - 127). One that is more than
            2 ** 39 below the largest of its row becomes 0.
        layout: the layout of the packed weight.
        halves: whether the low nibbles of a block are its first half, as in GGUF; else two neighbours share a byte.
        rows: the row of the blocks for each row of the weight; None for the same order.

    Raises:
        ValueError: a scale is 255 (nan).
    """
    *experts, n, groups = scales.shape
    stored = StoredWeight(LinearSpec("fp4_e2m1", 32), n, 32 * groups, _C.LAYOUT, *experts)
    packed = torch.empty(stored.shape, dtype=torch.uint8, device="cpu")
    matrices = zip(codes.cpu(), scales.cpu(), packed, strict=True) if experts else [(codes.cpu(), scales.cpu(), packed)]
    for of, scale, out in matrices:
        _C.pack_mxfp4(*((of, scale) if rows is None else (of[rows], scale[rows])), halves, out)
    return repack_weight(packed.to(codes.device), stored, layout)


def levels_of(format: str) -> Tensor:
    """Return the levels of a lookup format, float32 ``[codes]``."""
    codes = torch.arange(_C.FORMAT_FACTS[format]["code_max"] + 1, dtype=torch.uint8, device="cpu")[None]
    one, spec = torch.ones(1, 1, dtype=torch.float32, device="cpu"), LinearSpec(format)
    packed = CodedWeight.of(codes, one, None, spec).pack()
    return torch.ops.lowbit.dequantize(packed, *spec.weight_args(*codes.shape))[0]


def split_scale(scale: Tensor, group_size: int) -> tuple[Tensor, Tensor | None]:
    """Split scales ``[n, groups]`` into their stored factors: float32 per column, and float16 per group or None.

    The column factor is the largest power of two up to the column's largest scale. Division by it is exact, so float16
    scales of other checkpoints keep every bit. Half of that power is used if only then all scales of the column are
    exact: the factor of the largest group may have been rounded up to 2, and a larger column factor costs subnormal
    group factors a bit.
    """
    if not group_size:
        return scale[:, 0], None
    power = (scale.abs().amax(1).view(torch.int32) & 0x7F800000).view(torch.float32)  # keeps only the exponent
    half = power / 2
    column = torch.where(_keeps(scale, half) & ~_keeps(scale, power) & (half >= SMALLEST), half, power)[:, None]
    return column[:, 0], torch.where(column > 0, scale / column, 0).half()


def _keeps(scale: Tensor, column: Tensor) -> Tensor:
    """Return for every column whether the float16 group factors for this column factor are exact."""
    parts = scale / column[:, None]
    return (parts.half() == parts).all(1)


def _section(values: Tensor) -> Tensor:
    rows = values.clone(memory_format=torch.contiguous_format).view(torch.uint8)  # size 1 allows any stride
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % _SECTION))


def bit_stream(codes: Tensor, bits: int) -> Tensor:
    """Return the codes ``[n, k]`` as a stream of bits, uint8 ``[n, ceil(k * bits / 8)]``."""
    if bits == 8:
        return codes
    n, k = codes.shape
    eights = torch.nn.functional.pad(codes, (0, -k % 8)).view(n, -1, 8)
    stream = eights.new_zeros(n, eights.shape[1], bits)
    for code, byte, shift in _overlaps(bits):
        stream[:, :, byte] |= _shifted(eights[:, :, code], shift)
    return stream.flatten(1)[:, : -(-k * bits // 8)]


def codes_of(stream: Tensor, k: int, bits: int) -> Tensor:
    """Return the codes of a stream; the inverse of `bit_stream`."""
    if bits == 8:
        return stream
    n = stream.shape[0]
    parts = torch.nn.functional.pad(stream, (0, -stream.shape[1] % bits)).view(n, -1, bits)
    eights = parts.new_zeros(n, parts.shape[1], 8)
    for code, byte, shift in _overlaps(bits):
        eights[:, :, code] |= _shifted(parts[:, :, byte], -shift)
    return (eights.flatten(1)[:, :k] & 2**bits - 1).contiguous()


def _overlaps(bits: int) -> list[tuple[int, int, int]]:
    """Return where 8 codes overlap ``bits`` bytes, as (code, byte, left shift of the code in the byte)."""
    places = [(code, byte, bits * code - 8 * byte) for code in range(8) for byte in range(bits)]
    return [place for place in places if -bits < place[2] < 8]


def _shifted(values: Tensor, up: int) -> Tensor:
    return values << up if up >= 0 else values >> -up
