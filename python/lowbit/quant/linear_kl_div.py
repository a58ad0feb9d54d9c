# SPDX-License-Identifier: Apache-2.0
"""`lowbit.linear_kl_div`: the divergence of a language model from its teacher, of hidden states and both heads."""

from __future__ import annotations

import math

from torch import Tensor

from lowbit.formats.spec import StoredWeight
from lowbit.ops.linear_cross_entropy import REDUCTIONS
from lowbit.ops.linear_kl_div import Head
from lowbit.ops.linear_kl_div import linear_kl_div as _linear_kl_div
from lowbit.quant.functional import FLOATS, args_of_head

_NAME = "linear_kl_div"


def linear_kl_div(
    x: Tensor,
    head: Tensor,
    teacher_x: Tensor,
    teacher_head: Tensor,
    stored: StoredWeight | None = None,
    teacher_stored: StoredWeight | None = None,
    *,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    reduction: str = "mean",
    logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
) -> Tensor:
    """Compute KL(teacher || student) of the words that two heads predict, whose logits ``[T, V]`` are never in memory.

    ``s = logit_scale * (x @ head.T + bias)``, or ``softcap * tanh(s / softcap)``, and t likewise of the teacher; the
    divergence of a row is ``sum(p * (log(p) - log(q)))`` with ``p = softmax(t)`` and ``q = softmax(s)``. A temperature
    is a factor of both scales.

    Logits are float32, of a block of rows and of words at a time; sums over the vocabulary are float64. x, bias and a
    float head get gradients, for which the backward computes the logits again; a packed head is frozen, and if it
    rounds activations, gradients are straight-through. The teacher gets none. Second derivatives are refused.

    Args:
        x, teacher_x: hidden states ``[..., H]`` of both, float32, bfloat16 or float16; H may differ.
        head, teacher_head: packed weights, or float matrices ``[V, H]``, each as in `linear_cross_entropy`.
        stored, teacher_stored: format and size of a packed head, such as `QuantLinear.stored`; None for a float head.
        bias, teacher_bias: ``[V]``, any of the three float dtypes.
        reduction: "mean" over rows, "sum" or "none".
        logit_scale, teacher_logit_scale: factors of the logits, finite and not 0.
        softcap, teacher_softcap: positive bounds of the logits after the scale; None for none.

    Returns:
        float32: the divergence, or ``[...]`` divergences if reduction is "none".

    Raises:
        ValueError: the vocabularies or shapes differ, or an option is not one of the above.
        TypeError: a dtype is not one of the above, or a packed head has no ``stored``.
        NotImplementedError: no kernel row serves the device, or a forward-mode derivative is requested.

    Example:
        >>> loss = lowbit.linear_kl_div(hidden, lm_head.weight, taught, teacher.lm_head.weight, lm_head.stored)
    """
    head, teacher_head = head if stored is None else head.detach(), teacher_head.detach()  # it may say its model's dtype
    if reduction not in REDUCTIONS:
        raise ValueError(f"{_NAME}: reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    ours = _head("", head, stored, x, bias, logit_scale, softcap)
    theirs = _head("teacher_", teacher_head, teacher_stored, teacher_x, teacher_bias, teacher_logit_scale, teacher_softcap)
    if teacher_x.shape[:-1] != x.shape[:-1]:
        raise ValueError(f"{_NAME}: teacher_x must have the rows of x, {list(x.shape[:-1])}, got {list(teacher_x.shape[:-1])}")
    if theirs.op_args[0] != ours.op_args[0]:
        raise ValueError(f"{_NAME}: teacher_head must have the {ours.op_args[0]} words of head, got {theirs.op_args[0]}")
    rows, taught = x.reshape(-1, x.shape[-1]), teacher_x.reshape(-1, teacher_x.shape[-1])
    loss = _linear_kl_div(rows, head, bias, ours, taught, teacher_head, teacher_bias, theirs)
    if reduction == "none":
        return loss.view(x.shape[:-1])
    return loss.sum() if reduction == "sum" else loss.mean()


def _head(
    who: str, head: Tensor, stored: StoredWeight | None, x: Tensor, bias: Tensor | None, scale: float, softcap: float | None
) -> Head:
    """Return what the op takes of the student or the teacher, after checking it. ``who``: the prefix of the names."""
    op_args = args_of_head(_NAME, head, stored)
    n, k = op_args[:2]
    for name, tensor in (("x", x), ("bias", bias)):
        if tensor is not None and tensor.dtype not in FLOATS:
            raise TypeError(f"{_NAME}: {who}{name} must be {', '.join(FLOATS.values())}, got {tensor.dtype}")
        if tensor is not None and tensor.device != head.device:
            raise ValueError(f"{_NAME}: {who}{name} must be on {head.device} as {who}head, got {tensor.device}")
    if x.dim() == 0 or x.shape[-1] != k:
        raise ValueError(f"{_NAME}: {who}x must have shape [..., {k}] for this {who}head, got {list(x.shape)}")
    if bias is not None and tuple(bias.shape) != (n,):
        raise ValueError(f"{_NAME}: {who}bias must have shape [{n}], got {list(bias.shape)}")
    if not math.isfinite(scale) or scale == 0:
        raise ValueError(f"{_NAME}: {who}logit_scale must be finite and not 0, got {scale}")
    if softcap is not None and not (softcap > 0 and math.isfinite(softcap)):
        raise ValueError(f"{_NAME}: {who}softcap must be positive, or None for none, got {softcap}")
    return Head(op_args, scale, softcap or 0.0)
