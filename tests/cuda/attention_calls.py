# SPDX-License-Identifier: Apache-2.0
"""Calls of attention that together use every option of the rows for CUDA, and what they must give, in float64 with budgets.

Of what a row computes, probabilities and gradients of scores are rounded to the dtype of the inputs before the next product, by 1 + u; the
result that the backward starts from has the error of the probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from settings import forced
from torch import Tensor

import lowbit
from lowbit.score.program_cache import bind

Mod = Callable[..., Tensor]
ROWS = ("attention_forward_tiles_cuda", "attention_backward_tiles_cuda")
HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
FLOAT32 = 2.0**-17  # of sums in float32, cut by the tensor cores, and of powers of 2


@dataclass(frozen=True)
class AttentionCase:
    name: str
    shape: tuple[int, int, int, int, int, int, int]  # B, Hq, Hkv, L, S, E, Ev
    dtype: torch.dtype = torch.bfloat16
    score_mod: Mod | None = None  # after (score, b, h, q, k) takes what it captures
    captured: Sequence[tuple[int, ...]] = ()  # shapes of that
    mask_mod: Mod | None = None
    block_size: tuple[int, int] = (128, 128)
    causal: bool = False
    bias: torch.dtype | None = None
    least_rows: bool = False  # the bias of some rows is finfo.min, of others -2000
    sink: bool = False
    dropout_p: float = 0.0
    scale: float | None = None

    def __str__(self) -> str:
        return self.name


def same_document(b: Any, h: Any, q: Any, k: Any) -> Tensor:
    return (q // 57 == k // 57) & (k != 80)


BF16, FP16 = torch.bfloat16, torch.float16
CASES = [
    AttentionCase("plain 64", (1, 2, 1, 200, 150, 64, 64)),
    AttentionCase("causal 64", (2, 2, 2, 130, 200, 64, 64), FP16, causal=True),
    AttentionCase("causal, more queries", (1, 1, 1, 200, 70, 64, 64), causal=True),
    AttentionCase("causal 128", (1, 4, 2, 150, 150, 128, 128), causal=True),
    AttentionCase("plain 128", (1, 1, 1, 70, 90, 128, 128), FP16),
    AttentionCase("256", (1, 1, 1, 70, 50, 256, 256), FP16, causal=True),
    AttentionCase("odd head dims", (1, 2, 1, 65, 33, 80, 144)),
    AttentionCase("smallest", (1, 1, 1, 1, 1, 16, 16)),
    AttentionCase("negative scale, sink", (1, 2, 2, 70, 70, 64, 64), sink=True, scale=-0.3),
    AttentionCase("bool mask, dropout", (2, 2, 1, 70, 100, 64, 64), bias=torch.bool, dropout_p=0.25),
    AttentionCase("float mask", (1, 2, 2, 40, 50, 32, 48), FP16, bias=FP16, causal=True),
    AttentionCase("rows of finfo.min and of large scores", (1, 2, 1, 70, 100, 64, 64), bias=BF16, least_rows=True),
    AttentionCase("alibi", (1, 2, 2, 140, 140, 64, 64), score_mod=lambda s, b, h, q, k: s + (k - q) * 0.5 ** (h + 1)),
    AttentionCase("softcap and window", (1, 2, 1, 200, 200, 64, 64), score_mod=lambda s, b, h, q, k: 5 * torch.tanh(s / 5),
                  mask_mod=lambda b, h, q, k: (q >= k) & (q - k < 70), block_size=(64, 64)),
    AttentionCase("a learned bias of distances", (2, 2, 1, 100, 90, 128, 128), score_mod=lambda s, b, h, q, k, t: s + t[h, q - k + 100],
                  captured=((2, 200),)),
    AttentionCase("documents, blocks of odd sizes", (2, 2, 2, 230, 150, 64, 64), mask_mod=same_document, block_size=(100, 48)),
    AttentionCase("documents, most blocks empty", (1, 2, 2, 230, 450, 64, 64), mask_mod=same_document, block_size=(20, 15)),
    AttentionCase("a factor and a bias, captured, of documents", (1, 2, 1, 130, 130, 64, 64), FP16,
                  score_mod=lambda s, b, h, q, k, t, u: s * t[h] + u[q, k], captured=((2,), (130, 130)), mask_mod=same_document, sink=True),
    AttentionCase("probabilities below float16's normal numbers", (1, 4, 1, 1, 300, 64, 64), FP16, scale=0.5),
]  # fmt: skip

# Of which all keys are split among CTAs, by the kernel of decode.
FEW_QUERIES = [
    AttentionCase("one query", (2, 8, 2, 1, 300, 64, 64)),
    AttentionCase("causal, from the first key on", (1, 4, 1, 5, 400, 48, 80), FP16, causal=True, sink=True),
    AttentionCase("large scores", (1, 4, 1, 2, 300, 64, 64), scale=5.0),
    AttentionCase("a float mask", (1, 2, 2, 20, 270, 64, 48), FP16, bias=FP16, scale=-0.3),
    AttentionCase("alibi, documents", (1, 2, 1, 3, 300, 128, 128), score_mod=lambda s, b, h, q, k, t: s + t[h] * (k - q), captured=((2,),)),
]  # fmt: skip


WGMMA = ("attention_forward_wgmma_cuda", "attention_backward_wgmma_cuda")
BY_WARPGROUPS = [
    *(replace(case, block_size=(128, 128)) for case in CASES if case.shape[5] <= 128 and case.shape[6] in (64, 128) and not (case.captured and case.shape[6] == 64)),
    AttentionCase("a factor of each key, captured, of documents", (1, 2, 1, 130, 330, 64, 128), FP16, score_mod=lambda s, b, h, q, k, t: s * t[k], captured=((330,),),
                  mask_mod=same_document),
    AttentionCase("more tiles than stages", (1, 2, 1, 130, 700, 128, 64)),
    AttentionCase("one sees nothing, the next the last keys", (1, 1, 1, 200, 520, 32, 64), FP16, mask_mod=lambda b, h, q, k: (q > 128) & (k >= 2 * q + 50)),
]  # fmt: skip


def rows_of_warpgroups(case: AttentionCase) -> tuple[str, str]:
    """The backward takes no queries of 32 columns and no score_mod that gathers."""
    return WGMMA[0], ROWS[1] if case.shape[5] not in (64, 128) or case.captured else WGMMA[1]


def rows_of_few(case: AttentionCase) -> tuple[str, str]:
    return f"attention_forward_decode_{str(case.dtype)[6:]}_cuda", ROWS[1]


@dataclass
class AttentionData:
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None
    captured: list[Tensor]
    bias: Tensor | None
    sink: Tensor | None
    seed: Tensor | None


def make_data(case: AttentionCase) -> AttentionData:
    torch.manual_seed(0)
    b, hq, hkv, length, s, e, ev = case.shape
    made = [torch.randn(*shape).to(case.dtype) for shape in ((b, hq, length, e), (b, hkv, s, e), (b, hkv, s, ev), (b, hq, length, ev))]
    bias = None if case.bias is None else torch.rand(1, hq, length, s) < 0.8 if case.bias is torch.bool else torch.randn(b, 1, length, s).to(case.bias)
    if case.least_rows:
        bias[..., 5:9, :], bias[..., 20:, :] = torch.finfo(case.bias).min, -2000
    sink = torch.randn(hq) - 2000 * case.least_rows if case.sink else None
    seed = torch.tensor(1234567) if case.dropout_p else None
    return AttentionData(*made, torch.randn(b, hq, length), [torch.randn(shape) for shape in case.captured], bias, sink, seed)


def run(case: AttentionCase, data: AttentionData, device: str, suffix: str = "", rows: tuple[str, str | None] | None = None) -> dict[str, Tensor]:
    """Forward and backward (unless its row is None) on a device by the rows for CUDA; the results on the CPU. Only tiles give the largest
    scores, cuDNN none in float32."""
    rows = ROWS if rows is None else rows  # which tests of other devices replace
    call, names = (lambda tensor: None if tensor is None else tensor.to(device)), tuple(row and row + suffix for row in rows)
    largest_too, in_float32 = rows[0] in (ROWS[0], WGMMA[0]), "cudnn" not in rows[0]
    q, k, v, captured = call(data.q), call(data.k), call(data.v), [t.clone() for t in data.captured]
    score = case.score_mod and bind("test", lambda s, b, h, q, k: case.score_mod(s, b, h, q, k, *captured), mask=False, dtype=case.dtype)
    mask = case.mask_mod and bind("test", case.mask_mod, mask=True)
    lists = []
    if case.mask_mod:
        made = lowbit.create_block_mask(case.mask_mod, None, None, *case.shape[3:5], BLOCK_SIZE=case.block_size)
        lists = [t.to(device) for t in (made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices)]
    scale = case.shape[5] ** -0.5 if case.scale is None else case.scale
    programs = [score.code if score else [], [t.to(device) for t in score.captured] if score else []]
    masks = [mask.code if mask else [], [t.to(device) for t in mask.captured] if mask else [], lists, case.block_size, call(data.sink)]
    options = [scale, case.causal, call(data.bias), case.dropout_p, call(data.seed)]
    with forced(names[0]):
        out, lse, largest = torch.ops.lowbit.attention_forward(q, k, v, *options, *programs, *masks, largest_too, in_float32)
        narrow = torch.ops.lowbit.attention_forward(q, k, v, *options, *programs, *masks, False, False)[0]
    results = dict(narrow=narrow, lse=lse) | (dict(out=out) if in_float32 else {}) | (dict(largest=largest) if largest_too else {})
    if not rows[1]:
        return {name: result.cpu() for name, result in results.items()}
    needs, grad_out = [True] * len(programs[1]), data.grad_out.float() if in_float32 else data.grad_out
    with forced(names[1]):
        grads = torch.ops.lowbit.attention_backward(q, k, v, out, lse, call(grad_out), call(data.grad_lse), *options, *programs,
                                                    needs, *masks, False, case.sink)  # fmt: skip
    order = ["grad_q", "grad_k", "grad_v", *["grad_sink"] * case.sink, *(f"captured {i}" for i in range(len(captured)))]
    return {name: result.cpu() for name, result in (results | dict(zip(order, grads, strict=True))).items()}


def dropout_factors(case: AttentionCase, data: AttentionData) -> Tensor | float:
    """0 or 1 / (1 - p) for each probability, by the CPU: values are unit vectors and all probabilities equal."""
    if not case.dropout_p:
        return 1.0
    b, hq, _, length, s, *_ = case.shape
    q, k, v = torch.zeros(b, hq, length, 16), torch.zeros(b, hq, s, 16), torch.eye(s).expand(b, hq, s, s)
    masks = [[], [], [], [128, 128], None, False, False]
    return torch.ops.lowbit.attention_forward(q, k, v, 1.0, False, None, case.dropout_p, data.seed, [], [], *masks)[0].double() * s


def expected(case: AttentionCase, data: AttentionData) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each result what it must be, and by how much it may be off."""
    u, group = HALF_ULP[case.dtype], case.shape[1] // case.shape[2]
    scale = case.shape[5] ** -0.5 if case.scale is None else case.scale
    q, g = data.q.double(), data.grad_out.double()
    k, v = (t.double().repeat_interleave(group, 1) for t in (data.k, data.v))
    captured = [t.double().requires_grad_() for t in data.captured]
    raw = (q @ k.transpose(-2, -1) * scale).requires_grad_()
    place = torch.meshgrid(*(torch.arange(size) for size in raw.shape), indexing="ij")
    modify = (lambda s: case.score_mod(s, *place, *captured)) if case.score_mod else (lambda s: s * 1.0)
    scores = modify(raw)
    (slope,) = torch.autograd.grad(scores.sum(), raw, retain_graph=True)
    hidden = torch.zeros_like(raw, dtype=torch.bool)
    if case.mask_mod:
        hidden |= ~case.mask_mod(*place)
    if case.causal:
        hidden |= place[3] > place[2]
    s = scores.detach()
    if data.bias is not None:
        s = s.masked_fill(~data.bias, -torch.inf) if case.bias is torch.bool else s + data.bias.double()
    s = s.masked_fill(hidden, -torch.inf)
    with_sink = s if data.sink is None else torch.cat([s, data.sink.double()[:, None, None].expand(*s.shape[:-1], 1)], -1)
    lse = with_sink.logsumexp(-1)
    p = with_sink.softmax(-1)[..., : case.shape[4]].nan_to_num(0.0)  # where lse is finfo.min it is no sum any more
    factors = dropout_factors(case, data)
    dropped = p * factors
    out, size = dropped @ v, dropped @ v.abs()
    reach = (q.abs() @ k.abs().transpose(-2, -1)).amax(-1) * abs(scale)
    delta = (g * out).sum(-1) - (0 if data.grad_lse is None else data.grad_lse.double())
    dp = (g @ v.transpose(-2, -1)) * factors
    ds = p * (dp - delta[..., None])
    off = p * (2 * u * (g.abs() * size).sum(-1, keepdim=True) + FLOAT32 * (g.abs() @ v.abs().transpose(-2, -1)) * factors)
    off_raw, ds_raw = (off + FLOAT32 * ds.abs()) * slope.abs() * (1 + u) + u * (ds * slope).abs(), ds * slope
    grouped = lambda t: t.unflatten(1, (-1, group)).sum(2)  # noqa: E731
    wanted: dict[str, tuple[Tensor, Tensor]] = {
        "out": (out, (u + FLOAT32) * size),
        "narrow": (out, (2 * u + FLOAT32) * size),
        "lse": (lse, FLOAT32 * (1 + reach) + 2.0**-23 * lse.abs().nan_to_num(posinf=0.0)),
        "largest": (s.amax(-1), FLOAT32 * (1 + reach) + 2.0**-23 * lse.abs().nan_to_num(posinf=0.0)),
        "grad_q": (ds_raw @ k * scale, (off_raw @ k.abs()) * abs(scale) + u * (ds_raw @ k * scale).abs()),
    }
    grad_k = grouped(ds_raw.transpose(-2, -1) @ q * scale)
    grad_v, size_v = grouped(dropped.transpose(-2, -1) @ g), grouped(dropped.transpose(-2, -1) @ g.abs())
    wanted["grad_k"] = grad_k, grouped(off_raw.transpose(-2, -1) @ q.abs()) * abs(scale) + u * grad_k.abs()
    wanted["grad_v"] = grad_v, (u + FLOAT32 * (1 + reach.amax())) * size_v + u * grad_v.abs()
    if data.sink is not None:
        of_sink = with_sink.softmax(-1)[..., -1]
        wanted["grad_sink"] = -(of_sink * delta).sum((0, 2)), (of_sink * (u * (g.abs() * size).sum(-1) + FLOAT32 * (1 + delta.abs()))).sum((0, 2))
    grads = torch.autograd.grad(scores, captured, ds.masked_fill(hidden, 0.0)) if captured else ()
    offs = torch.autograd.grad(modify(raw.abs()), captured, off + FLOAT32 * ds.abs()) if captured else ()
    return wanted | {f"captured {i}": pair for i, pair in enumerate(zip(grads, offs, strict=True))}


def assert_right(case: AttentionCase, got: dict[str, Tensor], wanted: dict[str, tuple[Tensor, Tensor]]) -> None:
    of_forward = {"out", "narrow", "lse", "largest"}
    asked = wanted.keys() if got.keys() - of_forward else wanted.keys() & of_forward
    assert got.keys() >= asked - {"out", "largest"}, f"{case}: {sorted(got)}"
    for name, result in got.items():
        (exact, allowed), result = wanted[name], result.double()
        exact = exact.detach()
        same = (result == exact) | ((result - exact).abs() <= allowed + 2.0**-24)
        worst = ((result - exact).abs() / allowed).nan_to_num(math.inf).amax().item()
        assert same.all(), f"{case}: {name}: {(~same).sum().item()} of {same.numel()} elements are off, by up to {worst:.2f} of what is allowed"
