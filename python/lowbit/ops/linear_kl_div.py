# SPDX-License-Identifier: Apache-2.0
"""The divergence of a student's words from a teacher's, KL(teacher || student), over two heads whose logits are never in
memory as a whole:

    s = cap(scale * (x @ head.T + bias)),  t likewise of the teacher
    loss = sum over v of p[v] * (t[v] - s[v]) - lse(t) + lse(s),  p = softmax(t)
    dloss / ds = softmax(s) - p

The forward goes through the vocabulary once, a chunk of words and a block of rows at a time, with sums of exponentials
relative to the largest logit so far. It keeps the two lse of each row; the backward goes through the vocabulary again,
with the weights that the losses of rows have then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowbit.ops.decoded_rows import PANEL
from lowbit.ops.forward_mode import refuse_tangents
from lowbit.ops.input_gradient import input_gradient
from lowbit.ops.linear import LinearArgs
from lowbit.ops.registration import function_of, register

register()
_linear_function = function_of("linear")
_ROWS, _WORDS = 256, 4096  # of a block of logits: 4 MiB of float32, and some more of them for probabilities


class Head(NamedTuple):
    """How logits are made of the products with a head; a softcap of 0 means none."""

    op_args: LinearArgs
    scale: float
    softcap: float


def linear_kl_div(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    head: Head,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    teacher_head: Head,
) -> Tensor:
    """Return the divergence of each row, float32 ``[T]``, with gradients by x, a float weight and the bias.

    Args:
        x, teacher_x: ``[T, H]`` and ``[T, H of the teacher]``.
        weight, teacher_weight: packed, or ``[V, H]``.
    """
    if forward_ad._current_level >= 0:  # the level is -1 outside forward mode
        refuse_tangents("linear_kl_div", (x, weight, bias))
    teacher = teacher_x.detach(), teacher_weight.detach(), None if teacher_bias is None else teacher_bias.detach()
    return _Divergence.apply(x, weight, bias, head, *teacher, teacher_head)


class _Words:
    """Some words of a head: its part, in the form in which products take it."""

    def __init__(self, weight: Tensor, bias: Tensor | None, head: Head, start: int, stop: int) -> None:
        n, self.k, *self.rest, self.x_format = head.op_args
        self.count, self.head = stop - start, head
        self.packed = weight.dtype is torch.uint8
        self.bias = None if bias is None else bias[start:stop].float()
        if self.packed:
            self.weight = weight[start // PANEL : -(-stop // PANEL)]
        else:
            self.weight = weight[start:stop].float()

    def logits(self, x: Tensor) -> Tensor:
        if self.packed:
            y = _linear_function(x, self.weight, self.count, self.k, *self.rest, self.x_format, self.bias)
        else:
            y = x @ self.weight.T if self.bias is None else torch.addmm(self.bias, x, self.weight.T)
        y = y.mul_(self.head.scale) if self.head.scale != 1.0 else y
        return y.div_(self.head.softcap).tanh_().mul_(self.head.softcap) if self.head.softcap else y

    def slope(self, s: Tensor) -> Tensor | float:
        """Return ds / dlogit."""
        return self.head.scale * (1 - (s / self.head.softcap).square()) if self.head.softcap else self.head.scale

    def back(self, of_logits: Tensor) -> Tensor:
        """Return the gradient by x."""
        if self.packed:
            return input_gradient(of_logits, self.weight, (self.count, self.k, *self.rest))
        return of_logits @ self.weight


def _chunks(words: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + _WORDS, words)) for start in range(0, words, _WORDS))


def _blocks(rows: int) -> Iterator[slice]:
    return (slice(start, start + _ROWS) for start in range(0, rows, _ROWS))


def _floats(x: Tensor, block: slice) -> Tensor:
    return x[block].float().contiguous()


class _Sums:
    """The running sum of exp(value - top) of each row, and of factors times these, in float64."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.top = torch.full((rows,), -math.inf, device=device)
        self.sum = torch.zeros(rows, dtype=torch.float64, device=device)
        self.cross = torch.zeros_like(self.sum)

    def add(self, block: slice, values: Tensor, factors: Tensor | None = None) -> None:
        top = torch.maximum(self.top[block], values.amax(-1))
        shrink = (self.top[block] - top).double().exp()
        self.top[block] = top
        exponentials = values.sub_(top[:, None]).exp_()
        self.sum[block] = self.sum[block] * shrink + exponentials.sum(-1)
        if factors is not None:
            self.cross[block] = self.cross[block] * shrink + exponentials.mul_(factors).sum(-1)

    def lse(self) -> Tensor:
        return self.top.double() + self.sum.log()


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, head: Head, teacher_x: Tensor,
                teacher_weight: Tensor, teacher_bias: Tensor | None, teacher_head: Head) -> Tensor:  # fmt: skip
        rows, words = len(x), head.op_args[0]
        student, teacher = _Sums(rows, x.device), _Sums(rows, x.device)
        with torch.autocast(x.device.type, enabled=False):
            for chunk in _chunks(words):
                ours, theirs = _Words(weight, bias, head, *chunk), _Words(teacher_weight, teacher_bias, teacher_head, *chunk)
                for block in _blocks(rows):
                    s, t = ours.logits(_floats(x, block)), theirs.logits(_floats(teacher_x, block))
                    teacher.add(block, t.clone(), t - s)
                    student.add(block, s)
        lse, teacher_lse = student.lse(), teacher.lse()
        ctx.save_for_backward(x, weight, bias, teacher_x, teacher_weight, teacher_bias, lse.float(), teacher_lse.float())
        ctx.heads = head, teacher_head
        return (teacher.cross / teacher.sum - teacher_lse + lse).float()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(grad_out.device.type, enabled=False):
            return _Divergence._gradients(ctx, grad_out)

    @staticmethod
    def _gradients(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, teacher_x, teacher_weight, teacher_bias, lse, teacher_lse = ctx.saved_tensors
        head, teacher_head = ctx.heads
        needs_x, needs_head, needs_bias = ctx.needs_input_grad[:3]
        of_x = torch.zeros(x.shape, device=x.device) if needs_x else None
        of_head = torch.empty_like(weight) if needs_head else None
        of_bias = torch.empty_like(bias) if needs_bias else None
        for start, stop in _chunks(head.op_args[0]):
            ours = _Words(weight, bias, head, start, stop)
            theirs = _Words(teacher_weight, teacher_bias, teacher_head, start, stop)
            of_words = torch.zeros(stop - start, x.shape[-1], device=x.device) if needs_head else None
            of_part = torch.zeros(stop - start, device=x.device)
            for block in _blocks(len(x)):
                rows = _floats(x, block)
                s, t = ours.logits(rows), theirs.logits(_floats(teacher_x, block))
                slope = ours.slope(s)
                p = t.sub_(teacher_lse[block, None]).exp_()
                of_logits = s.sub_(lse[block, None]).exp_().sub_(p).mul_(slope).mul_(grad_out[block, None].float())
                if of_x is not None:
                    of_x[block] += ours.back(of_logits)
                if of_words is not None:
                    of_words.addmm_(of_logits.T, rows)
                if of_bias is not None:
                    of_part += of_logits.sum(0)
            if of_head is not None:
                of_head[start:stop] = of_words
            if of_bias is not None:
                of_bias[start:stop] = of_part
        return None if of_x is None else of_x.to(x.dtype), of_head, of_bias, None, None, None, None, None
