# SPDX-License-Identifier: Apache-2.0
"""The codes, scales and zero points of a weight ``[n, k]``, and the packed weight that holds them.

    w[n, k] = column_scale[n] * group_scale[n, g] * (code[n, k] - zero[n, g]),    g = k // group_size

They are written and read as "row-major" (csrc/formats/layout.hpp), from which `_C.repack` makes every other layout. A
row of the weight is uint8, each section of it padded to 16 bytes:
    column_scale float32 | group_scale float16 [groups] | zero float16 [groups] | codes [k]
A weight without groups has no group_scale, and a symmetric one no zero. Codes follow one another bit by bit, from the
lowest bit of a byte on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit import _C
from lowbit.formats.spec import LinearSpec, StoredWeight
from lowbit.quant.layout import repack_weight

SMALLEST = 2.0**-126  # a smaller scale has no float32 inverse: such a group counts as zero
_SECTION = 16  # bytes that a section is padded to


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """Codes, and scales and zero points as they are stored."""

    spec: LinearSpec
    codes: Tensor  # uint8 [n, k]
    column_scale: Tensor  # float32 [n]
    group_scale: Tensor | None  # float16 [n, groups]; None: one scale per column
    zero: Tensor | None  # float16 [n, groups]; None: the weight is symmetric

    @classmethod
    def of(cls, codes: Tensor, scale: Tensor, zero: Tensor | None, spec: LinearSpec) -> CodedWeight:
        """Return the weight of codes ``[n, k]``, and of scales and zero points ``[n, groups]`` float32, which are
        rounded for storage."""
        half = None if zero is None else zero.half()
        return cls(spec, codes, *split_scale(scale, spec.group_size), half)

    @classmethod
    def unpack(cls, packed: Tensor, stored: StoredWeight) -> CodedWeight:
        """Return the codes, scales and zero points of a packed weight; the inverse of `pack`."""
        spec, k = stored.spec, stored.k
        rows, begin, sections = repack_weight(packed, stored, "row-major"), 0, []
        groups, bits = spec.groups(k), _C.FORMAT_FACTS[spec.format]["bits"]
        per_group, code_bytes = 2 * groups, -(-k * bits // 8)
        for size in (4, per_group * bool(spec.group_size), per_group * spec.asymmetric, code_bytes):
            sections.append(rows[:, begin : begin + size].contiguous())
            begin += size + -size % _SECTION
        column_scale, group_scale, zero, stream = sections
        return cls(
            spec,
            _codes(stream, k, bits),
            column_scale.view(torch.float32)[:, 0],
            group_scale.view(torch.float16) if spec.group_size else None,
            zero.view(torch.float16) if spec.asymmetric else None,
        )

    def pack(self, layout: str = _C.LAYOUT) -> Tensor:
        """Return the packed weight in this layout."""
        stream = bit_stream(self.codes, _C.FORMAT_FACTS[self.spec.format]["bits"])
        sections = (self.column_scale[:, None], self.group_scale, self.zero, stream)
        rows = torch.cat([_section(values) for values in sections if values is not None], dim=1)
        return repack_weight(rows, StoredWeight(self.spec, *self.codes.shape, "row-major"), layout)

    @property
    def scale(self) -> Tensor:
        """The product of both scales, float32 ``[n, groups]``."""
        column = self.column_scale[:, None]
        return column if self.group_scale is None else column * self.group_scale.float()

    @property
    def zero_point(self) -> Tensor:
        """Float32 ``[n, groups]``, of a symmetric weight the one that its format has."""
        if self.zero is not None:
            return self.zero.float()
        return torch.full_like(self.scale, _C.FORMAT_FACTS[self.spec.format]["zero"])


def levels_of(format: str) -> Tensor:
    """Return the levels of a lookup format by code, float32."""
    codes = torch.arange(_C.FORMAT_FACTS[format]["code_max"] + 1, dtype=torch.uint8, device="cpu")[None]
    one, spec = torch.ones(1, 1, dtype=torch.float32, device="cpu"), LinearSpec(format)
    packed = CodedWeight.of(codes, one, None, spec).pack()
    return torch.ops.lowbit.dequantize(packed, *spec.weight_args(*codes.shape))[0]


def split_scale(scale: Tensor, group_size: int) -> tuple[Tensor, Tensor | None]:
    """Return scales ``[n, groups]`` as they are stored: float32 per column, and float16 per group or None.

    The part of a column is the power of two of its largest scale. To divide by it is exact, so float16 scales of other
    checkpoints keep every bit. The part is half of that power where this alone keeps every scale of the column: the
    largest group's part may have been rounded up to 2, and the next power of two takes a bit from subnormal parts.
    """
    if not group_size:
        return scale[:, 0], None
    power = (scale.abs().amax(1).view(torch.int32) & 0x7F800000).view(torch.float32)  # the exponent alone
    half = power / 2
    column = torch.where(_keeps(scale, half) & ~_keeps(scale, power) & (half >= SMALLEST), half, power)[:, None]
    return column[:, 0], torch.where(column > 0, scale / column, 0).half()


def _keeps(scale: Tensor, column: Tensor) -> Tensor:
    """Whether float16 parts of this column part are exact, for every column."""
    parts = scale / column[:, None]
    return (parts.half() == parts).all(1)


def _section(values: Tensor) -> Tensor:
    rows = values.clone(memory_format=torch.contiguous_format).view(torch.uint8)  # a size of 1 may have any stride
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % _SECTION))


def bit_stream(codes: Tensor, bits: int) -> Tensor:
    """Codes ``[n, k]`` bit by bit, ``[n, ceil(k * bits / 8)]``."""
    if bits == 8:
        return codes
    n, k = codes.shape
    eights = torch.nn.functional.pad(codes, (0, -k % 8)).view(n, -1, 8)
    stream = eights.new_zeros(n, eights.shape[1], bits)
    for code, byte, shift in _overlaps(bits):
        stream[:, :, byte] |= _shifted(eights[:, :, code], shift)
    return stream.flatten(1)[:, : -(-k * bits // 8)]


def _codes(stream: Tensor, k: int, bits: int) -> Tensor:
    """The inverse of `bit_stream`."""
    if bits == 8:
        return stream
    n = stream.shape[0]
    parts = torch.nn.functional.pad(stream, (0, -stream.shape[1] % bits)).view(n, -1, bits)
    eights = parts.new_zeros(n, parts.shape[1], 8)
    for code, byte, shift in _overlaps(bits):
        eights[:, :, code] |= _shifted(parts[:, :, byte], -shift)
    return (eights.flatten(1)[:, :k] & 2**bits - 1).contiguous()


def _overlaps(bits: int) -> list[tuple[int, int, int]]:
    """The places of 8 codes in ``bits`` bytes: (code, byte, how far the code is moved up in the byte)."""
    places = [(code, byte, bits * code - 8 * byte) for code in range(8) for byte in range(bits)]
    return [place for place in places if -bits < place[2] < 8]


def _shifted(values: Tensor, up: int) -> Tensor:
    return values << up if up >= 0 else values >> -up
