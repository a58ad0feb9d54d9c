# SPDX-License-Identifier: Apache-2.0
"""Attention in float64 by torch's own ops, on the whole matrix of scores, and how far a result may be from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from .compare import UNIT, unit_of_sums

Mod = Callable[..., Tensor]


@dataclass
class Result:
    """The results of attention, and the scores before and after everything."""

    out: Tensor
    lse: Tensor
    products: Tensor
    scores: Tensor
    p: Tensor


class _OurNumbers(TorchFunctionMode):
    """How numbers of a mod are here, where torch's own are not the better ones (docs/ops/flex_attention.md).

    torch.where(condition, a, b) is in the common dtype of a and b: vmap's takes that of the one that is mapped, if the other is not.
    A remainder is exact: torch's vectors of 16 float32 give nan for finfo.min % -0.5, as the quotient overflows, its scalars 0.
    ``wide``, for calls in float64: what torch would hold in float32 is float64, except in steps that torch runs, those of captured
    tensors alone.
    """

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self._wide, self._default = wide, torch.get_default_dtype()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.where and len(args) == 3 and all(isinstance(item, Tensor) for item in args):
            a, b = (torch.empty(item.shape, dtype=item.dtype, device="cpu") for item in args[1:])
            args = args[0], *(item.to(torch.result_type(a, b)) for item in args[1:])
        if (getattr(func, "__name__", "") in _BY_REMAINDER or "rounding_mode" in kwargs) and _float32(func(*args, **kwargs)):
            return func(*tree_map(_widened, args), **kwargs).float()
        if not self._wide or not any(map(_of_scores, tree_leaves((args, kwargs)))):
            return func(*args, **kwargs)
        args, kwargs = tree_map(_widened, (args, kwargs))
        torch.set_default_dtype(torch.float64 if self._default == torch.float32 else self._default)
        try:
            return func(*args, **kwargs) if func is not Tensor.float else args[0].double()
        finally:
            torch.set_default_dtype(self._default)


_BY_REMAINDER = ("remainder", "fmod", "floor_divide", "__mod__", "__rmod__", "__floordiv__", "__rfloordiv__")


def _float32(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype == torch.float32


def _of_scores(item: Any) -> bool:
    return isinstance(item, Tensor) and torch._C._functorch.is_batchedtensor(item)


def _widened(item: Any) -> Any:
    if item is torch.float32:
        return torch.float64
    return item.double() if _float32(item) else item


def over_scores(mod: Mod, scores: Tensor | None, shape: tuple[int, ...], wide: bool = False) -> Tensor:
    """The results of a mod for every score, by torch's vmap, as torch's eager flex_attention evaluates it."""
    first = () if scores is None else (0,)
    function = mod
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=first + dims)
    indices = [torch.arange(size, device="cpu") for size in shape]
    with _OurNumbers(wide):
        made = function(*indices) if scores is None else function(scores, *indices)
    return made.expand(shape)


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False, mask: Tensor | None = None, score_mod: Mod | None = None,
    mask_mod: Mod | None = None, sink: Tensor | None = None, wide: bool = False, rough: Tensor | None = None,
) -> Result:  # fmt: skip
    """softmax(score_mod(scale q k^T) + mask) v in the dtype of the arguments; a row that sees nothing is 0, its lse -inf.

    A score that is not finite among those of ``rough`` is what it is there. ``wide``: of float64 queries (`_OurNumbers`).
    """
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k, v = (tensor.repeat_interleave(group, 1) for tensor in (k, v))
    products = q @ k.transpose(-1, -2) * scale
    scores = products
    if score_mod is not None:
        scores = over_scores(score_mod, products, tuple(products.shape), wide).to(products.dtype)
    if rough is not None:
        scores = torch.where(rough.isfinite(), scores, rough.to(scores.dtype))
    hidden = torch.zeros(products.shape, dtype=torch.bool, device="cpu")
    if causal:
        hidden = hidden | torch.ones(products.shape[-2:], dtype=torch.bool, device="cpu").triu(1)
    if mask is not None and mask.dtype == torch.bool:
        hidden = hidden | ~mask
    if mask_mod is not None:
        hidden = hidden | ~over_scores(mask_mod, None, tuple(products.shape))
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask.to(scores.dtype)
    scores = scores.masked_fill(hidden, -torch.inf)
    joined = scores
    if sink is not None:
        joined = torch.cat([scores, sink[:, None, None].expand(*scores.shape[:3], 1).to(scores.dtype)], -1)
    if joined.shape[-1] == 0:
        out = q.new_zeros(*q.shape[:3], v.shape[-1]) + 0 * q.sum()
        return Result(out, q.new_full(q.shape[:3], -torch.inf), products, scores, scores)
    empty = (joined == -torch.inf).all(-1, keepdim=True)
    p = torch.softmax(joined.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)[..., : scores.shape[-1]]
    top = joined.detach().amax(-1, keepdim=True).nan_to_num(0.0, 0.0, 0.0)  # beside -1e38 the rest of lse, and its gradient, is lost
    return Result(p @ v, torch.logsumexp(joined - top, -1) + top[..., 0], products, scores, p)


def score_error(
    q: Tensor, k: Tensor, scale: float, exact: Result, mask: Tensor | None, rough: Result | None, dtype: torch.dtype
) -> Tensor:
    """How far the scores of a row that count may be off: roundings of q k^T, of a float mask, and 8 times what a mod in float32 is
    off (in float64: less by the ratio of their roundings).

    A mask that is so large that even float64 loses the score is exact: all that it hides is lost to every dtype.
    """
    u, columns = unit_of_sums(dtype), q.shape[-1]
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    magnitude = q.double().abs() @ k.double().abs().repeat_interleave(group, 1).transpose(-1, -2) * abs(scale)
    error = (columns + 16) * u * magnitude
    if mask is not None and mask.dtype != torch.bool:
        size = mask.double().abs().expand(magnitude.shape)
        lost = exact.products.detach().abs()
        of_mask = torch.minimum(4 * u * size, 2 * lost + 4 * u * size.clamp(max=1e6))
        error = error + torch.where(size * 2.0**-54 > lost, 0.0, of_mask)
    if rough is not None:
        off = (rough.scores.double() - exact.scores.detach()).abs().nan_to_num(0.0, 0.0, 0.0)
        error = error + 8 * off * (u / UNIT[torch.float32])
    finite = exact.scores.detach().abs().nan_to_num(0.0, 0.0, 0.0)
    error = error + torch.where(finite < 1e6, 8 * u * finite, 0.0)
    return torch.where(exact.p > 0, error, 0.0).amax(-1) if error.shape[-1] else error.sum(-1)


def budget(q: Tensor, v: Tensor, exact: Result, row: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Allowed errors of out and lse, from the errors of the scores of each row."""
    u, keys = unit_of_sums(dtype), v.shape[-2]
    largest = v.double().abs().amax() if v.numel() else torch.tensor(0.0, dtype=torch.float64)
    allowed = ((2 * row.clamp(max=1) + (keys + 32) * u) * largest)[..., None]
    allowed = allowed + UNIT[dtype] * (exact.out.detach().abs() + allowed) + torch.finfo(dtype).smallest_normal
    if dtype == torch.bfloat16:  # a row of the tile unit multiplies rounded probabilities
        of = v.double().abs().nan_to_num(0.0, 0.0, 0.0)
        share = exact.p.detach().nan_to_num(0.0, 0.0, 0.0)
        allowed = allowed + UNIT[dtype] * (share @ of.repeat_interleave(share.shape[-3] // max(of.shape[-3], 1), -3))
    lse = exact.lse.detach().abs().nan_to_num(0.0, 0.0, 0.0)
    return allowed, row + (keys + 32) * u + 4 * u * lse


def gradient_tolerance(dtype: torch.dtype, exact: Result, row: Tensor, columns: int) -> float:
    """Relative error of the gradients, of the largest that could be: roundings of the sums, of p, and of the dtype."""
    worst = float(row.detach().amax()) if row.numel() else 0.0
    keys = exact.scores.shape[-1] + exact.scores.shape[-2]
    return 16 * worst + 16 * (keys + columns + 64) * unit_of_sums(dtype) + 8 * UNIT[dtype]


def doubles(tensor: Any, dtype: torch.dtype = torch.float64) -> Any:
    """A leaf of this dtype with the same values, wherever the tensor is floating; it requires a gradient if that one does."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        return tensor
    return tensor.detach().to(dtype, copy=True).requires_grad_(tensor.requires_grad)


def copied(tensor: Any) -> Any:
    """A leaf of the same dtype and values; it requires a gradient if that one does."""
    if not isinstance(tensor, Tensor):
        return tensor
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
