# SPDX-License-Identifier: Apache-2.0
"""Quantization of a weight: choose scales, round, and decode.

    w[n, k] = column_scale[n] * group_scale[n, g] * (code[n, k] - zero[n, g])

g = k // group_size; group_size 0 means one group per column ("per channel"). Codes are unsigned; a symmetric format has
a fixed zero such as 128 (int8) or 8 (int4). A lookup format (``LEVELS``) has the level of a code in place of code -
zero. ``SEMI_SPARSE`` is int8 of a weight that is pruned first (`prune`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SEMI_SPARSE = "int8_semi_sparse"
SMALLEST = 2.0**-126  # a smaller scale has no float32 inverse, so its group counts as zeros


def _nf4_levels() -> Tensor:
    """Return quantiles of the normal distribution (QLoRA, arXiv 2305.14314), with bitsandbytes' intermediate
    roundings."""
    last = 0.9677083  # (1 - 1 / 30 + 1 - 1 / 32) / 2
    grids = [torch.linspace(last, 0.5, count, dtype=torch.float32, device="cpu") for count in (9, 8)]
    tails = [torch.special.ndtri(grid[:-1].double()).float() for grid in grids]
    levels = torch.cat([tails[0], tails[0].new_zeros(1), -tails[1]]).sort().values
    return levels / levels[-1]


def _both_signs(magnitudes: list[float]) -> Tensor:
    positive = torch.tensor(magnitudes, dtype=torch.float32, device="cpu")
    return torch.cat([positive, -positive])


LEVELS = {
    "nf4": _nf4_levels(),
    "fp4": _both_signs([0, 0.0625, 8, 12, 4, 6, 2, 3]) / 12,
    "fp4_e2m1": _both_signs([0, 0.5, 1, 1.5, 2, 3, 4, 6]),
    "fp8_e4m3": torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float(),
}
"""The levels of the lookup formats by code, float32. Those of fp4 are bitsandbytes'; two of its codes are 0."""


def largest_level(format: str) -> float:
    """Return the level to which the largest weight of a group is mapped."""
    return LEVELS[format].nan_to_num().max().item()


def float_dtype(format: str) -> torch.dtype | None:
    """Return the dtype of a float format, whose name is torch's, or None for a format with codes."""
    dtype = getattr(torch, format, None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None


def bits_of(format: str) -> int:
    """Return the bits of a code, the first number in the name of a format with codes."""
    return int("".join(letter if letter.isdigit() else " " for letter in format).split()[0])


def code_of_zero(format: str) -> int:
    """Return the code of 0 in a symmetric weight."""
    return LEVELS[format].tolist().index(0) if format in LEVELS else 2 ** (bits_of(format) - 1)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Plain codes, and the scales as they are stored."""

    format: str
    group_size: int
    codes: Tensor  # uint8 [n, k]
    column_scale: Tensor  # float32 [n]
    group_scale: Tensor | None  # float16 [n, groups], absent per channel
    zero: Tensor | None  # float16 [n, groups], absent if symmetric

    @classmethod
    def of(cls, codes: Tensor, scale: Tensor, zero: Tensor | None, format: str, group_size: int) -> QuantizedWeight:
        """Return a weight with codes ``[n, k]``, scales and zero points ``[n, groups]``, which are rounded for storage.
        Those of a `QuantizedWeight` stay exact."""
        half = None if zero is None else zero.half()
        return cls(format, group_size, codes, *split_stored_scale(scale, group_size), half)

    @property
    def scale(self) -> Tensor:
        """The product of both scales, rounded to float32, ``[n, groups]``."""
        if self.group_scale is None:
            return self.column_scale[:, None]
        return self.column_scale[:, None] * self.group_scale.float()

    @property
    def zero_or_symmetric(self) -> Tensor:
        """The zero point of every group as float32 ``[n, groups]``, including the fixed one of a symmetric format."""
        if self.zero is not None:
            return self.zero.float()
        return torch.full_like(self.scale, 0 if self.format in LEVELS else code_of_zero(self.format))

    @property
    def levels(self) -> Tensor:
        """The value of each code before zero point and scale, float64 ``[n, k]``."""
        return LEVELS[self.format].double()[self.codes.int()] if self.format in LEVELS else self.codes.double()

    def spread(self, per_group: Tensor) -> Tensor:
        """Repeat a value per group for every k: ``[n, groups]`` to ``[n, k]``."""
        k = self.codes.shape[1]
        return per_group.repeat_interleave(self.group_size or k, dim=1)[:, :k]

    def decode(self) -> Tensor:
        """Return the weight, float64 ``[n, k]``."""
        steps = self.levels - self.spread(self.zero_or_symmetric).double()
        return self.spread(self.scale).double() * steps


def group_ranges(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Return the min and max weight of each group, widened to contain 0: two ``[n, groups]``."""
    n, k = weight.shape
    size = group_size or k
    padded = torch.nn.functional.pad(weight, (0, -k % size)).view(
        n, -1, size
    )  # zeros do not change a range that contains 0
    return padded.amin(2).clamp(max=0), padded.amax(2).clamp(min=0)


def choose_scale(low: Tensor, high: Tensor, format: str, mapping: str) -> Tensor:
    """Return the ideal scale of each group, float32.

    ``symmetric`` is torchao's: the largest weight is clipped by at most half a step.
    ``symmetric_no_clipping_err``: nothing is clipped.
    ``asymmetric``: the codes span min to max.
    """
    if format in LEVELS:
        return torch.maximum(-low, high) / largest_level(format)
    half = 2.0 ** (bits_of(format) - 1)
    if mapping == "symmetric":
        return torch.maximum(-low, high) / (half - 0.5)
    if mapping == "symmetric_no_clipping_err":
        return torch.maximum(-low / half, high / (half - 1))
    if mapping == "asymmetric":
        span, most = high - low, 2 * half - 1
        return torch.where(span.isfinite(), span / most, high / most - low / most)
    raise ValueError(f"quantize: unknown mapping {mapping!r}")


def split_scale(scale: Tensor, group_size: int) -> tuple[Tensor, Tensor | None]:
    """Split a scale per group into float32 per column times float16 per group.

    The column's part is the largest power of two not above its largest scale. Dividing by it is exact, so float16
    scales of other checkpoints keep every bit.
    """
    if not group_size:
        return scale[:, 0], None
    column_scale = (scale.abs().amax(1).view(torch.int32) & 0x7F800000).view(torch.float32)  # the exponent alone
    fraction = torch.where(column_scale[:, None] > 0, scale / column_scale[:, None], 0)
    return column_scale, fraction.half()


def split_stored_scale(scale: Tensor, group_size: int) -> tuple[Tensor, Tensor | None]:
    """Split like :func:`split_scale`, but by half the power of two if only that keeps every scale of a column.

    A column's largest part may have been rounded up to 2. With the next power of two, subnormal parts would lose a bit.
    """
    column_scale, group_scale = split_scale(scale, group_size)
    if group_scale is None:
        return column_scale, None
    half_column = column_scale / 2
    twice = scale / half_column[:, None]
    loses = (column_scale[:, None] * group_scale.float() != scale).any(1)
    lower = loses & (half_column >= SMALLEST) & (twice.half().float() == twice).all(1)
    return torch.where(lower, half_column, column_scale), torch.where(lower[:, None], twice.half(), group_scale)


def quantize(weight: Tensor, format: str, group_size: int, mapping: str) -> QuantizedWeight:
    """Quantize weights ``[n, k]``. Codes are rounded half to even, using the stored scale.

    Args:
        weight: finite; float32, bfloat16 or float16 (computed in float32).
        format: ``int2`` to ``int8``, ``SEMI_SPARSE``, or one of ``LEVELS``.
        group_size: the group size along k; 0 for one scale per column.
        mapping: see :func:`choose_scale`.
    """
    weight = weight.float()
    weight = prune(weight) if format == SEMI_SPARSE else weight
    low, high = group_ranges(weight, group_size)
    ideal = choose_scale(low, high, format, mapping)
    column_scale, group_scale = split_scale(torch.where(ideal >= SMALLEST, ideal, 0), group_size)
    codes = torch.empty_like(weight, dtype=torch.uint8)
    stored = QuantizedWeight(format, group_size, codes, column_scale, group_scale, None)
    divisor = torch.where(stored.scale > 0, stored.scale, 1)
    if format in LEVELS:
        codes = nearest_codes(weight / stored.spread(divisor), format)
        return QuantizedWeight(format, group_size, codes, column_scale, group_scale, None)
    largest = 2 ** bits_of(format) - 1
    zero = stored.zero_or_symmetric
    if mapping == "asymmetric":
        zero = torch.where(stored.scale > 0, torch.round(-low / divisor), 0).clamp(max=largest)
    codes = torch.round(weight / stored.spread(divisor) + stored.spread(zero)).clamp(0, largest).byte()
    return QuantizedWeight(
        format, group_size, codes, column_scale, group_scale, zero.half() if mapping == "asymmetric" else None
    )


def prune(weight: Tensor) -> Tensor:
    """Prune ``[n, k]`` to 2:4: of each four neighbours along k, the two largest stay, or the first of equal ones."""
    fours = weight.unflatten(1, (-1, 4))
    order = fours.abs().argsort(dim=2, descending=True, stable=True)
    kept = torch.zeros_like(fours, dtype=torch.bool).scatter_(2, order[:, :, :2], True)
    return torch.where(kept, fours, 0).flatten(1)


def nearest_codes(values: Tensor, format: str) -> Tensor:
    """Return the codes of the nearest levels, uint8. A tie goes to the lower level of a table, and to the even float8;
    values past the largest level become that level."""
    if format == "fp8_e4m3":
        most = largest_level(format)
        return values.clamp(-most, most).to(torch.float8_e4m3fn).view(torch.uint8)
    rising = LEVELS[format].sort().values
    codes = [LEVELS[format].tolist().index(level) for level in rising.tolist()]
    first = torch.tensor(codes, dtype=torch.uint8, device=values.device)
    return first[torch.searchsorted((rising[1:] + rising[:-1]) / 2, values.contiguous())]
