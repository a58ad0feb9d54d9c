# SPDX-License-Identifier: Apache-2.0
"""Attention against float64 torch: forward, lse, largest score, gradients, second derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tests.settings import ambient, here, in_child
from torch import Tensor
from torch.nn import functional

import lowbit
from lowbit.ops.attention import attention as attention_op

from .compare import UNIT, Wrong, taken_by, unit_of_sums, within
from .reference import Mod, Result, attend, budget, copied, doubles, gradient_tolerance, score_error

Call = Callable[..., Tensor]


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, order: int = 0, how: str = "grad", under: str = "", installed: bool = False,
) -> None:  # fmt: skip
    """scaled_dot_product_attention, where torch takes the arguments; its derivatives up to ``order``."""
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    plain = [None if tensor is None else tensor.detach() for tensor in (q, k, v, attn_mask)]
    if not taken_by(lambda: functional.scaled_dot_product_attention(*plain, **options)):
        return
    function = lowbit.scaled_dot_product_attention
    if installed:
        lowbit.attention.install()
        function = functional.scaled_dot_product_attention
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None and q.shape[-1] else scale or 0.0
    _derivatives(
        lambda q, k, v, mask: function(q, k, v, mask, **options), lambda q, k, v, mask: attend(q, k, v, factor, causal=is_causal, mask=mask),
        (q, k, v, attn_mask), factor, order, how, under,
    )  # fmt: skip


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool = False, scale: float = 1.0, order: int = 0,
    how: str = "grad", under: str = "",
) -> None:  # fmt: skip
    """lowbit.ops.attention.attention, which also takes a mask with causal."""
    _derivatives(
        lambda q, k, v, mask: attention_op(q, k, v, scale=scale, causal=causal, mask=mask)[0],
        lambda q, k, v, mask: attend(q, k, v, scale, causal=causal, mask=mask), (q, k, v, mask), scale, order, how, under,
    )  # fmt: skip


def _derivatives(
    ours: Call, wanted: Callable[..., Result], inputs: tuple[Tensor | None, ...], scale: float, order: int, how: str, under: str
) -> None:
    q, k, v, mask = inputs
    assert q is not None and k is not None and v is not None
    exact_inputs = [doubles(tensor) for tensor in inputs]
    exact = wanted(*exact_inputs)
    plain_mask = None if mask is None else mask.detach()
    row = score_error(q.detach(), k.detach(), scale, exact, plain_mask, None, q.dtype).detach()
    allowed, _ = budget(q.detach(), v.detach(), exact, row, q.dtype)
    with ambient(under):
        out = ours(*inputs)
    if out.dtype != q.dtype:
        raise Wrong(f"out is {out.dtype}, wanted {q.dtype}")
    within(out, exact.out, allowed, "out")
    worst = float(row.amax()) if row.numel() else 0.0
    if order == 0 or not out.requires_grad or not exact.out.isfinite().all() or worst > 0.02:
        return
    tolerance = gradient_tolerance(q.dtype, exact, row, q.shape[-1])
    leaves = [index for index, tensor in enumerate(inputs) if tensor is not None and tensor.requires_grad]
    weight = torch.randn(out.shape, dtype=torch.float64, device="cpu")
    further = [torch.randn_like(inputs[index], device="cpu").double() for index in leaves]  # the gradients have the dtypes of the leaves
    with ambient("" if "device" in under else under):  # torch's own backward fails under a default device
        got = _grads(ours, list(inputs), leaves, weight, further, order, how)
    want = _grads(lambda *tensors: wanted(*tensors).out, exact_inputs, leaves, weight, further, order, "create_graph")
    sizes = [abs(scale), *(float(tensor.detach().abs().amax()) for tensor in (q, k, v) if tensor.numel())]
    largest = math.prod(max(1.0, size) for size in sizes) * math.sqrt(weight.numel() + 1)
    for level, (gots, wants) in enumerate(zip(got, want, strict=True), 1):
        for index, mine, exactly in zip(leaves, gots, wants, strict=True):
            size = float(exactly.abs().amax()) if exactly.numel() else 0.0
            limit = (tolerance + 8 * UNIT[mine.dtype]) * (size + largest) * (4 if level == 2 else 1)
            name = ("q", "k", "v", "mask")[index]
            within(mine, exactly, limit, f"{('gradient', 'second derivative')[level - 1]} of {name}")


def _grads(
    call: Call, inputs: list[Any], leaves: list[int], weight: Tensor, further: list[Tensor], order: int, how: str
) -> list[list[Tensor]]:
    """First and, for order 2, second derivatives of sum(call * weight) and sum(first * further)."""

    def loss(*tensors: Tensor) -> Tensor:
        given = list(inputs)
        for index, tensor in zip(leaves, tensors, strict=True):
            given[index] = tensor
        return (call(*given).double() * weight).sum()

    chosen = [inputs[index] for index in leaves]
    if how == "func":
        first_of = torch.func.grad(loss, argnums=tuple(range(len(leaves))))
        first = list(first_of(*chosen))
        if order == 1:
            return [first]
        second_of = torch.func.grad(lambda *x: _dot(first_of(*x), further), argnums=tuple(range(len(leaves))))
        return [first, list(second_of(*chosen))]
    first = _grad(loss(*chosen), chosen, create_graph=order == 2 or how == "create_graph")
    if order == 1:
        return [first]
    total = _dot(first, further)
    return [first, _grad(total, chosen)]


def _grad(loss: Tensor, leaves: list[Tensor], create_graph: bool = False) -> list[Tensor]:
    if not loss.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(loss, leaves, create_graph=create_graph, allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found, strict=True)]


def _dot(tensors: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    products = [(tensor.double() * weight).sum() for tensor, weight in zip(tensors, weights, strict=True)]
    return sum(products, torch.zeros((), dtype=torch.float64))


def flex(
    q: Tensor, k: Tensor, v: Tensor, make: Callable[..., Mod] | None = None, captured: Sequence[Any] = (), *,
    make_mask: Callable[..., Mod] | None = None, mask_captured: Sequence[Any] = (), block: int | tuple[int, int] = 128,
    per: tuple[int | None, int | None] = (None, None), scale: float | None = None, gradients: bool = False, under: str = "",
    what: str = "",
) -> None:  # fmt: skip
    """flex_attention with the mod that ``make(*captured)`` returns, in or without a block mask; out, lse, largest score, gradients.

    The reference has scores in float64; how far the same with scores in float32 is from it says what a mod may be off.
    """
    what = f"{what}: " if what else ""
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    leaves = [tensor for tensor in (q, k, v, *captured) if isinstance(tensor, Tensor) and tensor.requires_grad]
    wide = q.dtype == torch.float64

    def reference(dtype: torch.dtype, copy: Callable[[Any], Any] = copied, **options: Any) -> tuple[Result, list[Tensor]]:
        given = [doubles(tensor, dtype) for tensor in (q, k, v)] + [copy(tensor) for tensor in captured]
        score_mod = None if make is None else make(*given[3:])
        mask_mod = None if make_mask is None else make_mask(*mask_captured)
        result = attend(*given[:3], factor, score_mod=score_mod, mask_mod=mask_mod, **options)
        return result, [tensor for tensor in given if isinstance(tensor, Tensor) and tensor.requires_grad]

    settings = under if under.startswith("default dtype") else ""
    try:
        with ambient(settings):
            exact, _ = reference(torch.float64, wide=wide)
            rough, _ = reference(torch.float32)
            if overflows := not wide and bool((exact.scores.isfinite() & ~rough.scores.isfinite()).any()):
                exact, _ = reference(torch.float64, rough=rough.scores.detach())
            summed, exact_leaves = reference(torch.float64, doubles, wide=wide)  # torch sums gradients in the dtype of their leaf
    except Exception:
        return  # torch does not take it
    with ambient(under):
        mask = None
        if make_mask is not None:
            mask = lowbit.create_block_mask(make_mask(*mask_captured), *per, q.shape[2], k.shape[2], BLOCK_SIZE=block)
        score_mod = None if make is None else make(*captured)
        request = lowbit.AuxRequest(lse=True, max_scores=True)
        out, aux = lowbit.flex_attention(q, k, v, score_mod, mask, scale, q.shape[1] != k.shape[1], return_aux=request)
    _compare_flex(q, k, v, factor, out, aux, exact, rough, what)
    finite = exact.out.isfinite().all() and (exact.lse.isfinite() | (exact.lse == -torch.inf)).all()
    if gradients and leaves and finite and not overflows:
        _flex_gradients(out, aux.lse, leaves, summed, exact_leaves, what, q, _apart(exact, summed))


def _apart(one: Result, other: Result) -> Tensor:
    """Largest difference of two results' scores in each row, of those that count."""
    difference = torch.where(one.p > 0, (one.scores - other.scores).abs().nan_to_num(0.0, 0.0, 0.0), 0.0).detach()
    return difference.amax(-1) if difference.shape[-1] else difference.sum(-1)


def _compare_flex(
    q: Tensor, k: Tensor, v: Tensor, factor: float, out: Tensor, aux: Any, exact: Result, rough: Result | None, what: str
) -> None:
    row = score_error(q.detach(), k.detach(), factor, exact, None, rough, q.dtype).detach()
    allowed, allowed_lse = budget(q.detach(), v.detach(), exact, row, q.dtype)
    within(out, exact.out, allowed, f"{what}out")
    lse = exact.lse.masked_fill(exact.lse == torch.inf, torch.nan)  # a row with a score of inf is nan, out and lse
    within(aux.lse, lse, allowed_lse, f"{what}lse")
    if exact.scores.shape[-1] and not exact.scores.isnan().any():
        largest = exact.scores.detach().amax(-1)
        of_largest = row + 4 * unit_of_sums(q.dtype) * largest.abs().nan_to_num(0, 0, 0)
        within(aux.max_scores, largest, of_largest, f"{what}max_scores")


def _flex_gradients(
    out: Tensor, lse: Tensor, leaves: list[Tensor], exact: Result, exact_leaves: list[Tensor], what: str, q: Tensor, row: Tensor
) -> None:
    """``row``: how far the scores of a row are from those of the call, as torch rounds what is in fewer bits."""
    if exact.scores.numel() == 0:
        return
    weight = torch.randn(out.shape, dtype=torch.float64, device="cpu")
    seen = torch.where(exact.lse.detach().isfinite(), torch.randn(lse.shape, dtype=torch.float64, device="cpu"), 0.0)

    def grads(out: Tensor, lse: Tensor, leaves: list[Tensor]) -> list[Tensor]:
        return _grad((out.double() * weight).sum() + (lse.double().masked_fill(seen == 0, 0.0) * seen).sum(), leaves)

    try:
        want = grads(exact.out, exact.lse, exact_leaves)
    except RuntimeError:
        return  # torch has no derivative of it
    got = grads(out, lse, leaves)
    for index, (mine, exactly) in enumerate(zip(got, want, strict=True)):
        if exactly.isfinite().all():
            size = float(exactly.abs().amax()) if exactly.numel() else 0.0
            of_mod = 1e-3 * unit_of_sums(q.dtype) / UNIT[torch.float32]
            limit = (gradient_tolerance(q.dtype, exact, row, q.shape[-1]) + of_mod) * (size + 1.0)
            limit = limit + UNIT[mine.dtype] * exactly.detach().abs() + torch.finfo(mine.dtype).smallest_normal
            within(mine, exactly, limit, f"{what}gradient of leaf {index}")


def flex_now(
    q: Tensor, k: Tensor, v: Tensor, *, score_mod: Mod | None = None, mask_mod: Mod | None = None, leaves: Sequence[Tensor] = (),
    what: str = "", where: Callable[[Callable[[], Any]], Any] = here,
) -> None:  # fmt: skip
    """flex_attention with mods as they are now, whatever they read: the reference runs the same mods, now, in float64.

    ``where`` the call runs: here, in_thread, or in_child (then without gradients).
    """
    factor = 1 / math.sqrt(q.shape[-1])
    given = [doubles(tensor) for tensor in (q, k, v)]
    exact = attend(*given, factor, score_mod=score_mod, mask_mod=mask_mod)
    rough = attend(*(tensor.detach().float() for tensor in (q, k, v)), factor, score_mod=score_mod, mask_mod=mask_mod)

    def call() -> Any:
        lengths = q.shape[2], k.shape[2]
        mask = mask_mod and lowbit.create_block_mask(mask_mod, None, None, *lengths, BLOCK_SIZE=16)
        request = lowbit.AuxRequest(lse=True, max_scores=True)
        out, aux = lowbit.flex_attention(q, k, v, score_mod, mask, None, q.shape[1] != k.shape[1], return_aux=request)
        return (out.detach(), aux.lse.detach(), aux.max_scores) if where is in_child else (out, aux.lse, aux.max_scores)

    out, *others = where(call)
    aux = lowbit.AuxOutput(*others)
    what = f"{what}: " if what else ""
    _compare_flex(q, k, v, factor, out, aux, exact, rough, what)
    if leaves and where is not in_child:
        copies = {id(tensor): copy for tensor, copy in zip((q, k, v), given, strict=True)}
        row = torch.zeros_like(exact.lse.detach())
        _flex_gradients(out, aux.lse, list(leaves), exact, [copies.get(id(leaf), leaf) for leaf in leaves], what, q, row)
