# SPDX-License-Identifier: Apache-2.0
"""Batches of an encoder without their padding: the real tokens of all sequences, packed into one row.

The masks that the layers get say which tokens are real: each token sees all real tokens of its sequence, or those
within a window. A batch with another mask runs as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.models.steps import MISSING


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A batch whose real tokens are packed into one row.

    Args:
        inputs: those of a `LayerProgram`, of the packed tokens: x ``[1, T, H]``; cos, sin and the mask of each kind;
            and the ends of the sequences, int32 ``[B + 1]``.
        rows: where the tokens were, among all tokens of the batch.
        shape: that of x, ``[B, L, H]``.
    """

    inputs: list[Tensor]
    rows: Tensor
    shape: torch.Size

    def padded(self, y: Tensor) -> Tensor:
        """Return ``y [1, T, H]`` as ``[B, L, H]``, with zeros in place of padding."""
        batch, length, _ = self.shape
        whole = y.new_zeros(batch * length, y.shape[-1])
        return whole.index_copy_(0, self.rows, y[0]).view(batch, length, -1)


def packed_batch(inputs: Sequence[Tensor], windows: Sequence[int | None]) -> PackedBatch | None:
    """Return the batch without its padding, or None if it has none, or masks that say something else.

    Args:
        inputs: those of a `LayerProgram`: x ``[B, L, H]``, and cos, sin and mask of each kind.
        windows: by kind, how far a token sees on each side; None for all tokens.
    """
    x, masks = inputs[0], inputs[3::3]
    real = _real_tokens(masks, windows, x)
    if real is None:
        return None
    batch, length, hidden = x.shape
    lengths = real.sum(1, dtype=torch.int32)
    rows, longest = real.flatten().nonzero()[:, 0], int(lengths.max())
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))

    def packed(of: Tensor) -> Tensor:
        return of.expand(batch, -1, -1).reshape(batch * length, -1).index_select(0, rows)[None]

    of_packed = [packed(x)]
    for kind, window in enumerate(windows):
        cos, sin = inputs[1 + 3 * kind : 3 + 3 * kind]
        of_packed += (cos, sin) if cos is MISSING else (packed(cos), packed(sin))
        of_packed.append(MISSING if window is None or longest <= window + 1 else _band(longest, window)[None, None])
    return PackedBatch([*of_packed, cu_seqlens], rows, x.shape)


def _real_tokens(masks: Sequence[Tensor], windows: Sequence[int | None], x: Tensor) -> Tensor | None:
    """Return which tokens are real, bool ``[B, L]``, or None if all are, or if the masks say something else."""
    batch, length, _ = x.shape
    if any(mask.shape != (batch, 1, length, length) or mask.dtype != torch.bool for mask in masks):
        return None
    real = masks[0].diagonal(dim1=2, dim2=3)[:, 0]
    if real.all() or not real.any():
        return None
    if any(window is not None for window in windows) and not _in_one_piece(real):
        return None
    for mask, window in zip(masks, windows, strict=True):
        seen = real[:, None, None]
        if not mask.eq(seen if window is None else seen & _band(length, window)).all():
            return None
    return real


def _in_one_piece(real: Tensor) -> bool:
    """Whether the real tokens of each sequence follow one another, so that their distances stay the same."""
    begins = real[:, 1:] & ~real[:, :-1]
    return bool((begins.sum(1) + real[:, 0] <= 1).all())


def _band(length: int, window: int) -> Tensor:
    """Return the mask of a window, bool ``[length, length]``."""
    return torch.ones(length, length, dtype=torch.bool, device="cpu").tril(window).triu(-window)
