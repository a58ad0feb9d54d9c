# SPDX-License-Identifier: Apache-2.0
"""Cross entropy of logits in float64, differentiable; and the errors that a kernel in float32 may have."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

U = 2.0**-24
EXP = 6
"""Roundings of exp, relative to its value: 2e-7 of its polynomial, and those of the arguments."""


class Loss(NamedTuple):
    """What is wanted for each row: float64."""

    loss: Tensor
    lse: Tensor
    s: Tensor


def linear_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    scale: float = 1.0,
    softcap: float = 0.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Loss:
    """Return loss and lse ``[T]``, 0 for rows without a label, and s ``[T, V]``; logits ``[T, V]`` in float64."""
    s = logits * scale
    s = softcap * (s / softcap).tanh() if softcap else s
    lse, has_label = s.logsumexp(-1), labels != ignore_index
    of_label = s.gather(-1, labels.where(has_label, 0)[:, None])[:, 0]
    loss = lse - (1 - label_smoothing) * of_label - label_smoothing * s.mean(-1) + z_loss * lse.square()
    return Loss(loss.where(has_label, 0), lse.where(has_label, 0), s)


def allowed_losses(
    wanted: Loss,
    logits: Tensor,
    allowed: Tensor,
    *,
    scale: float = 1.0,
    softcap: float = 0.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the errors of the losses and of lse ``[T]``, and of s ``[T, V]``.

    Args:
        wanted: what `linear_cross_entropy` returned.
        logits, allowed: ``[T, V]``, and the errors that they may have themselves.

    A cap's tanh has 8 roundings of its bound. lse moves at most as far as the s that moves most; the sum is of V
    exponentials, added 16 at a time in float32 within a chunk of 128, and of chunks in float64.
    """
    of_s = abs(scale) * allowed + U * (scale * logits).abs() + (8 * U * softcap if softcap else 0.0)
    worst = of_s.amax(-1)
    of_lse = worst + (EXP + 12) * U + 2 * U * wanted.s.abs().amax(-1)
    of_loss = of_lse + worst + 2 * U * (wanted.loss.abs() + wanted.lse.abs() * label_smoothing)
    return of_loss + 2 * z_loss * (wanted.lse.abs() + of_lse) * of_lse, of_lse + U * wanted.lse.abs(), of_s


class Gradients(NamedTuple):
    """What is wanted of sum(row_weight * loss), float64: by x ``[T, H]``, the head ``[V, H]`` and the bias ``[V]``."""

    x: Tensor
    head: Tensor
    bias: Tensor


def gradients(
    x: Tensor,
    head: Tensor,
    labels: Tensor,
    wanted: Loss,
    of_s: Tensor,
    row_weight: Tensor,
    *,
    ignore_index: int = -100,
    scale: float = 1.0,
    softcap: float = 0.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Gradients, Gradients]:
    """Return the gradients, and the errors that they may have before they are rounded to their dtype.

    A probability errs by the s that move most, twice, and by the roundings of exponentials and their sum. A sum of n
    products errs by n roundings of their magnitudes; a decoded weight by 16 of the largest of its row, as codes are
    taken relative to a zero point.
    """
    n, (lse, s) = head.shape[0], wanted[1:]
    has_label = labels != ignore_index
    onehot = torch.zeros_like(s).scatter_(1, labels.where(has_label, 0)[:, None], 1 - label_smoothing)
    p = (s - s.logsumexp(-1, keepdim=True)).exp() * (1 + 2 * z_loss * lse)[:, None]
    slope = 1 - (s / softcap).square() if softcap else torch.ones_like(s)
    factor = (scale * row_weight.double()).where(has_label, 0)[:, None]
    gradient = factor * slope * (p - label_smoothing / n - onehot)
    magnitude = factor.abs() * (p.abs() + label_smoothing / n + onehot)
    of_slope = (2 * of_s + 8 * U * softcap) / softcap + 4 * U if softcap else 0.0
    of_p = p.abs() * (2 * of_s.amax(-1, keepdim=True) + (2 * EXP + 32) * U)
    error = factor.abs() * slope * of_p + magnitude * (of_slope + 4 * U)
    x, head, wide = x.double(), head.double(), head.double().abs().amax(-1, keepdim=True)
    terms = magnitude * slope.clamp(min=U)
    return Gradients(gradient @ head, gradient.T @ x, gradient.sum(0)), Gradients(
        error @ head.abs() + U * ((n + 16) * terms @ head.abs() + 16 * (terms @ wide)),
        error.T @ x.abs() + (len(x) + 16) * U * terms.T @ x.abs(),
        error.sum(0) + (len(x) + 16) * U * terms.sum(0),
    )
