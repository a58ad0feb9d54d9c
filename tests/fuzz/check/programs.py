# SPDX-License-Identifier: Apache-2.0
"""Score programs as lists of integers: valid ones against the reference in float64, hostile ones must raise or run, and harm nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tests import internals
from torch import Tensor

from lowbit import _C
from lowbit.ops.attention import attention
from lowbit.reference import score_program as reference

from .compare import Wrong, within
from .processes import no_crash

_B, _H = 1, 2


def program(
    code: list[int], captured: Sequence[Tensor], rows: int, cols: int, q0: int = 0, k0: int = 0, jumps: bool = False
) -> None:
    """Evaluate a valid program on a tile of scores, and its gradient, in float32 and float64.

    ``jumps``: it has ops that are not continuous, so that only the float64 form is compared.
    """
    for dtype in (torch.float64,) if jumps else (torch.float64, torch.float32):
        scores = torch.randn(rows, cols, dtype=torch.float64).to(dtype)
        wide = scores.double().requires_grad_()
        leaves = [tensor.double().requires_grad_() if tensor.is_floating_point() else tensor for tensor in captured]
        try:
            wanted = reference.evaluate(code, _C.SCORE_OPS, leaves, wide, b=_B, h=_H, q0=q0, k0=k0)
        except (IndexError, RuntimeError):
            no_crash(lambda: internals.score_program_eval(code, list(captured), _B, _H, q0, k0, scores))
            return
        memory = torch.full((rows * cols + 128,), 3.0, dtype=dtype)
        result = memory[64 : 64 + rows * cols].view(rows, cols).copy_(scores)
        given = [
            tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype == torch.float64 else tensor
            for tensor in captured
        ]
        internals.score_program_eval(code, given, _B, _H, q0, k0, result)
        if not ((memory[:64] == 3.0).all() and (memory[64 + rows * cols :] == 3.0).all()):
            raise Wrong("score_program_eval wrote beside its scores")
        tolerance = 1e-9 if dtype == torch.float64 else 2e-4
        if wanted.dtype == torch.bool:
            wanted = torch.where(wanted, wide, -torch.inf)
        size = wanted.detach().abs().nan_to_num(0.0, 0.0, 0.0)
        within(result, wanted, tolerance * (1 + size + float(size.amax())), f"score program in {str(dtype)[6:]}")
    if not jumps and q0 == k0 == 0 and not _C.score_program_explain(code)["is_mask"]:
        _through_attention(code, captured, rows, cols)


def _through_attention(code: list[int], captured: Sequence[Tensor], rows: int, cols: int) -> None:
    q, k = torch.randn(2, 3, rows, 8), torch.randn(2, 3, cols, 8)
    raw = q.double() @ k.double().transpose(-1, -2)
    try:
        heads = [
            [reference.evaluate(code, _C.SCORE_OPS, captured, raw[b, h], b=b, h=h) for h in range(3)] for b in range(2)
        ]
    except (IndexError, RuntimeError):  # for another b or h; what the result does not need may still be left out
        no_crash(lambda: attention(q, k, k, scale=1.0, score_mod=code, score_captured=list(captured)))
        return
    scores = torch.stack([torch.stack(each) for each in heads])
    if not scores.isfinite().all() or scores.abs().max() > 50:
        return
    out, lse, _ = attention(q, k, k, scale=1.0, score_mod=code, score_captured=list(captured))
    within(lse, scores.logsumexp(-1), 1e-2, "lse of a score program")
    within(out, scores.softmax(-1) @ k.double(), 5e-2, "attention of a score program")


def hostile(code: list[int], captured: Sequence[Tensor], rows: int, cols: int) -> None:
    """A list that may be no program: refuse it, or run it without touching what is beside the scores and the captured tensors."""
    before = [tensor.clone() for tensor in captured]
    memory = torch.full((rows * cols + 128,), 3.0)
    scores = memory[64 : 64 + rows * cols].view(rows, cols).normal_()
    gradient = torch.randn(rows, cols)
    q, k = torch.randn(2, 3, rows, 8), torch.randn(2, 3, cols, 8)
    no_crash(lambda: internals.score_program_eval(code, list(captured), _B, _H, 0, 0, scores))
    nothing = [None] * len(captured)
    no_crash(lambda: internals.score_program_backward(code, list(captured), _B, _H, 0, 0, scores, gradient, nothing))
    no_crash(lambda: attention(q, k, k, scale=1.0, score_mod=code, score_captured=list(captured)))
    no_crash(lambda: attention(q, k, k, scale=1.0, mask_mod=code, mask_captured=list(captured)))
    classes = torch.empty(1, 1, -(-rows // 16), -(-cols // 16), dtype=torch.uint8)
    no_crash(lambda: _C.block_classes(code, list(captured), 1, 1, rows, cols, 16, 16, classes))
    no_crash(lambda: _C.score_program_explain(code))
    if not ((memory[:64] == 3.0).all() and (memory[64 + rows * cols :] == 3.0).all()):
        raise Wrong("a hostile score program wrote beside its scores")
    pairs = zip(before, captured, strict=True)
    if not all(torch.equal(old.nan_to_num(), new.nan_to_num()) for old, new in pairs):
        raise Wrong("a hostile score program wrote to a captured tensor")
