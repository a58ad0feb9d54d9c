# SPDX-License-Identifier: Apache-2.0
"""Calls of decode that together use every option of the rows for CUDA, and what they must give, in
float64 with budgets.

Queries and probabilities are cut to two parts of 16 bits (2^-16 and less), scores and sums are float32. The row of
prompts rounds probabilities to 16 bits; its keys and values are those of kv_dequantize.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from settings import forced
from tests import internals
from torch import Tensor

from lowbit.reference import decode as reference
from lowbit.score.program_cache import bind

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HALF_ULP = {BF16: 2.0**-9, FP16: 2.0**-12, FP32: 2.0**-24}
PARTS = 2.0**-15  # of a cut number and of float32 sums that tensor cores cut
ROW = {"int8": "decode_int8_cuda", "int4": "decode_int4_cuda", BF16: "decode_bfloat16_cuda", FP16: "decode_float16_cuda"}


@dataclass(frozen=True)
class DecodeCase:
    name: str
    shape: tuple[int, int, int, int, int, int, int]  # B, Hq, Hkv, L, S, E, Ev
    cache: Any  # int8, int4 or a dtype
    dtype: torch.dtype = BF16
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    mask: torch.dtype | None = None
    sink: bool = False
    token_major: bool = False  # [B, S, H, ...]
    factor: float = 1.0  # of queries
    score_mod: Callable[..., Tensor] | None = None  # 1-Lipschitz in the score; after (score, b, h, q, k) takes what it captures
    mask_mod: Callable[..., Tensor] | None = None
    captured: Sequence[tuple[int, ...]] = ()  # shapes of what score_mod captures
    prompt: bool = False  # by the rows of prompts

    def __str__(self) -> str:
        return self.name


CASES = [
    DecodeCase("int8, a group of 4", (2, 8, 2, 1, 300, 64, 64), "int8"),
    DecodeCase("int8, float32, causal", (1, 4, 1, 3, 200, 128, 96), "int8", FP32, {"causal": True, "position": 150}, token_major=True),
    DecodeCase("int8, a window, a sink", (1, 2, 2, 2, 400, 64, 32), "int8", FP16, {"causal": True, "position": 398, "window": 90}, sink=True),
    DecodeCase("int8, rotated, odd head dims", (1, 3, 1, 1, 70, 80, 59), "int8", BF16, {"rotated": True}, mask=torch.bool),
    DecodeCase("int8, a prompt", (1, 4, 1, 12, 130, 64, 64), "int8", BF16, {"causal": True, "position": 118}),
    DecodeCase("int8, a prompt of blocks, a window", (1, 2, 1, 70, 400, 32, 32), "int8", BF16, {"causal": True, "position": 330, "window": 150}, sink=True),
    DecodeCase("int4, splits of two tiles a warp", (1, 2, 1, 1, 4200, 64, 32), "int4", sink=True),
    DecodeCase("int4, a group of 8", (1, 8, 1, 1, 260, 128, 128), "int4", BF16, {"rotated": True}),
    DecodeCase("int4, float32, a float mask", (2, 2, 1, 5, 150, 96, 40), "int4", FP32, {"rotated": True}, mask=FP32),
    DecodeCase("int4, 256, a sink", (1, 2, 1, 1, 65, 256, 256), "int4", FP16, {}, sink=True, token_major=True),
    DecodeCase("bfloat16", (1, 4, 2, 1, 333, 128, 64), BF16),
    DecodeCase("bfloat16, 256", (1, 2, 1, 1, 300, 256, 160), BF16),
    DecodeCase("float16, causal", (2, 2, 1, 4, 140, 64, 72), FP16, FP16, {"causal": True, "position": 100}, mask=FP16),
    DecodeCase("bfloat16, a prompt", (1, 3, 1, 6, 90, 40, 32), BF16, BF16, {"causal": True, "position": 84}),
    DecodeCase("int8, a captured bias of distances", (2, 4, 2, 3, 200, 64, 64), "int8", BF16, {"causal": True, "position": 197},
               score_mod=lambda s, b, h, q, k, t: s + t[h, q - k], captured=((4, 200),)),
    DecodeCase("int4, documents, a float mask", (2, 4, 1, 2, 150, 64, 64), "int4", FP32, {"rotated": True, "position": 148}, FP32,
               mask_mod=lambda b, h, q, k: (k // 64 == q // 64) | (k % 3 == b)),
    DecodeCase("bfloat16, a softcap, a window", (1, 4, 1, 5, 140, 64, 64), BF16, BF16, {"position": 135}, sink=True,
               score_mod=lambda s, b, h, q, k: 3 * torch.tanh(s / 3), mask_mod=lambda b, h, q, k: (k <= q) & (k > q - 90)),
    DecodeCase("int8, decoded, a group of 4", (2, 8, 2, 70, 150, 64, 64), "int8", BF16, {"causal": True, "position": 80}, prompt=True),
    DecodeCase("int8, decoded, a window, a sink", (1, 2, 2, 200, 400, 64, 32), "int8", FP16, {"causal": True, "position": 199, "window": 50}, sink=True,
               token_major=True, prompt=True),
    DecodeCase("int8, decoded, rotated, a window", (1, 3, 1, 130, 250, 80, 48), "int8", BF16, {"rotated": True, "position": 100, "window": 90}, prompt=True),
    DecodeCase("int4, decoded, a window after many tiles", (1, 2, 1, 70, 620, 128, 128), "int4", BF16, {"causal": True, "position": 540, "window": 60}, prompt=True),
    DecodeCase("int8, decoded, before the keys", (1, 2, 1, 100, 90, 128, 64), "int8", FP16, {"causal": True, "position": -20}, FP32, prompt=True),
    DecodeCase("int4, decoded, rotated, a mask", (2, 4, 2, 67, 131, 128, 128), "int4", BF16, {"rotated": True, "position": 64}, torch.bool, prompt=True),
    DecodeCase("int4, decoded, 256, a window behind all keys", (1, 1, 1, 140, 100, 256, 256), "int4", FP16, {"position": 60, "window": 70}, FP16, prompt=True),
    DecodeCase("int4, decoded, a captured bias of distances", (2, 4, 2, 80, 200, 64, 64), "int4", BF16, {"position": 120},
               score_mod=lambda s, b, h, q, k, t: s + t[h, q - k], captured=((4, 200),), prompt=True),
    DecodeCase("int8, decoded, a softcap, documents, a window", (2, 4, 1, 90, 300, 64, 64), "int8", BF16, {"position": 205, "window": 130}, sink=True,
               score_mod=lambda s, b, h, q, k: 3 * torch.tanh(s / 3), mask_mod=lambda b, h, q, k: (k // 64 == q // 64) | (k % 3 == b), prompt=True),
    DecodeCase("bfloat16, a prompt, a window", (2, 4, 2, 90, 300, 64, 32), BF16, BF16, {"causal": True, "position": 210, "window": 100}, sink=True,
               token_major=True, prompt=True),
    DecodeCase("int8, decoded, captured slopes of heads", (1, 4, 2, 70, 150, 64, 64), "int8", BF16, {"causal": True, "position": 80},
               score_mod=lambda s, b, h, q, k, t: s + t[h] * (k - q), captured=((4,),), prompt=True),
    DecodeCase("float16, a prompt, a softcap", (1, 2, 1, 70, 150, 128, 128), FP16, FP16, {"position": 60}, FP16,
               score_mod=lambda s, b, h, q, k: 3 * torch.tanh(s / 3), prompt=True),
    DecodeCase("one key, 1 column", (1, 1, 1, 1, 1, 1, 1), "int8", FP32),
    DecodeCase("tiny queries", (1, 2, 1, 1, 150, 64, 64), "int8", FP32, factor=1e-30),
    DecodeCase("huge queries", (1, 2, 1, 1, 150, 64, 64), "int8", FP32, {"scale": 1e-37}, factor=1e36),
]  # fmt: skip


@dataclass
class DecodeData:
    q: Tensor
    call: dict[str, Any]  # arguments of internals.decode beside q, out and lse, on the CPU
    out: Tensor
    lse: Tensor
    allowed: Tensor
    allowed_lse: Tensor


def quantized(x: Tensor, format: str, rotate: bool) -> tuple[Tensor, Tensor]:
    padded = -(-x.shape[-1] // 32) * 32
    codes, scale = ((padded, torch.int8), (1, FP32)) if format == "int8" else ((padded // 2, torch.uint8), (padded // 32, FP16))
    stored = [torch.zeros(*x.shape[:3], size, dtype=dtype) for size, dtype in (codes, scale)]
    torch.ops.lowbit.kv_quantize_(x, *stored, rotate=rotate)
    return stored[0], stored[1]


def dequantized(codes: Tensor, scale: Tensor, columns: int, dtype: torch.dtype, rotated: bool) -> Tensor:
    rows = torch.empty(*codes.shape[:3], columns, dtype=dtype)
    torch.ops.lowbit.kv_dequantize_(codes, scale, rows, rotated)
    return rows.double()


def make_data(case: DecodeCase) -> DecodeData:
    torch.manual_seed(0)
    b, hq, hkv, length, s, e, ev = case.shape
    q, k, v = (torch.randn(b, hq, length, e) * case.factor).to(case.dtype), torch.randn(b, hkv, s, e), torch.randn(b, hkv, s, ev)
    options = {"scale": e**-0.5} | case.options
    rotated = options.get("rotated", False)
    if isinstance(case.cache, str):
        stored = [*quantized(k, case.cache, rotated), *quantized(v, case.cache, False)]
        if case.prompt:
            k, v, exact_q = dequantized(*stored[:2], e, case.dtype, rotated), dequantized(*stored[2:], ev, case.dtype, False), q.double()
        else:
            k, v = reference.decoded(*stored[:2]), reference.decoded(*stored[2:])[..., :ev]
            exact_q = reference.rotate(q) if rotated else reference.pad(q.double())
    else:
        stored, exact_q = [k.to(case.cache), v.to(case.cache)], q.double()
        k, v = stored[0].double(), stored[1].double()
    if case.token_major:
        stored = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in stored]
    call = options | dict(zip(("k", "k_scale", "v", "v_scale") if len(stored) == 4 else ("k", "v"), stored, strict=True))
    if case.mask is torch.bool:
        call["mask"] = (torch.rand(b, 1, length, s) > 0.4).expand(b, hq, length, s)
    elif case.mask is not None:
        call["mask"] = torch.randn(1, hq, 1, s).to(case.mask).expand(b, hq, length, s)
    if case.sink:
        call["sink"] = torch.randn(hq)
    given = {name: call[name] for name in ("causal", "position", "window", "mask", "sink") if name in call}
    if case.score_mod or case.mask_mod:
        given["mask"] = with_mods(case, call, exact_q @ k.transpose(-1, -2).repeat_interleave(hq // hkv, 1) * options["scale"])
    out, lse, p = reference.decode(exact_q, k, v, options["scale"], **given)
    group = hq // hkv
    k, v = k.double().abs().repeat_interleave(group, 1), v.double().abs().repeat_interleave(group, 1)
    off = PARTS * ((exact_q.abs() @ k.transpose(-1, -2)).amax(-1) * options["scale"] + 1 + 2.0**-8 * lse.abs().nan_to_num(posinf=0.0))
    allowed = (2 * off[..., None] + PARTS + 2 * HALF_ULP[case.dtype] * case.prompt) * (p @ v)
    return DecodeData(q, call, out, lse, allowed + HALF_ULP[case.dtype] * (out.abs() + allowed) * 2, off)


def with_mods(case: DecodeCase, call: dict[str, Any], scores: Tensor) -> Tensor:
    """Adds the mods to the call; returns what they and its mask add to the scores."""
    b, h, q, k = (torch.arange(size).view([-1 if d == i else 1 for d in range(4)]) for i, size in enumerate(scores.shape))
    q = q + call.get("position", 0)
    added = call.get("mask", torch.zeros(())).double().expand(scores.shape).clone()
    if case.score_mod:
        captured = [torch.randn(shape) for shape in case.captured]
        added += case.score_mod(scores, b, h, q, k, *(t.double() for t in captured)) - scores
        score_mod = case.score_mod
        call["score_mod"] = bind("decode", lambda s, b, h, q, k: score_mod(s, b, h, q, k, *captured), mask=False)
    if case.mask_mod:
        added.masked_fill_(~case.mask_mod(b, h, q, k), -torch.inf)
        call["mask_mod"] = bind("decode", case.mask_mod, mask=True)
    return added


def row_of(case: DecodeCase) -> str:
    return ROW[case.cache].replace("decode_", "decode_prompt_") if case.prompt else ROW[case.cache]


def run(case: DecodeCase, data: DecodeData, device: str, suffix: str = "", row: str | None = None) -> tuple[Tensor, Tensor]:
    """The op on a device by the row for CUDA: out and lse on the CPU."""
    call = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in data.call.items()}
    for name in ("score_mod", "mask_mod"):
        if name in call:
            bound = call.pop(name)
            call |= {name: bound.code, name.replace("_mod", "_captured"): [t.to(device) for t in bound.captured]}
    out, lse = torch.full(data.out.shape, 7.0, dtype=case.dtype).to(device), torch.full(data.lse.shape, 7.0).to(device)
    with forced((row or row_of(case)) + suffix):
        internals.decode(data.q.to(device), call.pop("k"), call.pop("v"), out, call.pop("scale"), lse=lse, **call)
    return out.cpu(), lse.cpu()


def assert_right(case: DecodeCase, data: DecodeData, out: Tensor, lse: Tensor | None = None) -> None:
    """torch's op gives no lse."""
    wanted = [("out", out, data.out, data.allowed)]
    if lse is not None:
        wanted.append(("lse", lse, data.lse, data.allowed_lse))
    for name, result, exact, allowed in wanted:
        result = result.double()
        same = (result == exact) | ((result - exact).abs() <= allowed + 2.0**-26)
        worst = ((result - exact).abs() / allowed).nan_to_num(torch.inf).amax().item()
        assert same.all(), f"{case}: {name}: {(~same).sum().item()} of {same.numel()} elements are off, by up to {worst:.2f} of what is allowed"
