# SPDX-License-Identifier: Apache-2.0
"""decode, kv_quantize and kv_dequantize: every row against float64, the same bits on every instruction set, thread count and batch."""

from __future__ import annotations

import functools
import itertools
import zlib
from dataclasses import dataclass

import pytest
import torch
from row_fixture import fixture_of
from settings import forced, same_for_any_threads
from tests import internals
from torch import Tensor

from lowbit import _C, testing
from lowbit.reference import decode as reference
from lowbit.score.program import ProgramBuilder

KINDS = ("float32", "bfloat16", "float16", "int8", "int4")
U = testing.ROUNDOFF["float32"]
INT16 = 2.0**-16  # a probability or a query as int16: half a step of largest / 32767
SHAPES = [  # B, Hq, Hkv, L, S, E, Ev: lengths around the split of 256 and the tiles, every group size of the row tiles, odd head dimensions
    (1, 1, 1, 1, 1, 1, 1),
    (1, 8, 2, 1, 1000, 64, 64),
    (2, 3, 3, 1, 257, 128, 128),
    (1, 4, 1, 5, 513, 40, 59),
    (2, 6, 3, 3, 100, 80, 96),
    (1, 32, 8, 16, 300, 64, 64),
    (1, 71, 1, 2, 255, 64, 17),
    (3, 2, 2, 1, 256, 128, 64),
    (1, 5, 1, 1, 33, 100, 31),
    (2, 20, 5, 4, 1289, 64, 48),  # token-major: tasks of four kv heads and of one; a last token alone
]
OPTIONS = ("plain", "causal", "window", "bool mask", "float mask", "sink")


@dataclass(frozen=True)
class Case:
    shape: tuple[int, int, int, int, int, int, int]
    option: str
    kind: str
    q_dtype: str = "float32"
    token_major: bool = False

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))}-{self.option.replace(' ', '_')}-{self.kind}-{self.q_dtype}-{self.token_major:d}"


@dataclass
class Data:
    call: dict[str, object]  # arguments of internals.decode beside q, out and lse
    q: Tensor
    out: Tensor
    lse: Tensor
    allowed: Tensor
    allowed_lse: Tensor


def cases(kind: str) -> list[Case]:
    """Each shape with two of the options, in both layouts and all dtypes of q in turn."""
    result = []
    for index, (shape, half) in enumerate(itertools.product(SHAPES, (0, 1))):
        option = OPTIONS[(index * 5 + 3 * half) % len(OPTIONS)]
        result.append(Case(shape, option, kind, testing.DTYPES[index % 3], index % 2 == 1))
    return result


def quantized(x: Tensor, kind: str, rotate: bool, token_major: bool = False) -> tuple[Tensor, Tensor]:
    batch, heads, length, columns = x.shape
    padded = -(-columns // 32) * 32
    sizes = (padded, 1) if kind == "int8" else (padded // 2, padded // 32)
    dtypes = (torch.int8, torch.float32) if kind == "int8" else (torch.uint8, torch.float16)
    stored = []
    for size, dtype in zip(sizes, dtypes, strict=True):
        shape = (batch, length, heads, size) if token_major else (batch, heads, length, size)
        tensor = torch.full(shape, 77, dtype=dtype)
        stored.append(tensor.transpose(1, 2) if token_major else tensor)
    torch.ops.lowbit.kv_quantize_(x, *stored, rotate=rotate)
    return stored[0], stored[1]


@functools.cache
def make(case: Case) -> Data:
    """Once for the rows of all instruction sets."""
    batch, q_heads, kv_heads, length, keys, e, ev = case.shape
    generator = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q = normal(batch, q_heads, length, e).to(getattr(torch, case.q_dtype))
    k, v = normal(batch, kv_heads, keys, e), normal(batch, kv_heads, keys, ev)
    options: dict[str, object] = {}
    if case.option in ("causal", "window"):
        options = {"causal": True, "position": keys - length}
    if case.option == "window":
        options["window"] = max(1, keys // 3)
    if case.option == "bool mask":
        mask = torch.rand(batch, 1, length, keys, generator=generator) > 0.5
        mask[0, 0, 0] = False  # a row that sees nothing
        options["mask"] = mask.expand(batch, q_heads, length, keys)
    if case.option == "float mask":
        options["mask"] = normal(1, q_heads, 1, keys).expand(batch, q_heads, length, keys)
    if case.option == "sink":
        options["sink"] = normal(q_heads)
    call = dict(options)
    if case.kind in ("int8", "int4"):
        rotated = case.kind == "int4"
        (k, k_scale), (v, v_scale) = quantized(k, case.kind, rotated, case.token_major), quantized(v, case.kind, False, case.token_major)
        call |= {"k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale, "rotated": rotated}
        k, v = reference.decoded(k, k_scale), reference.decoded(v, v_scale)[..., :ev]
        exact_q = reference.rotate(q) if rotated else reference.pad(q.double())
    else:
        dtype = getattr(torch, case.kind)
        k, v = k.to(dtype), v.to(dtype)
        if case.token_major:
            k, v = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (k, v))
        call |= {"k": k, "v": v}
        exact_q = q.double()
    scale = e**-0.5
    call["scale"] = scale
    out, lse, p = reference.decode(exact_q, k, v, scale, **options)
    allowed, allowed_lse = budget(case, exact_q, k, v, scale, p, out, lse, options)
    return Data(call, q, out, lse, allowed, allowed_lse)


def budget(case: Case, q: Tensor, k: Tensor, v: Tensor, scale: float, p: Tensor, out: Tensor, lse: Tensor,
           options: dict[str, object]) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A score is off by (E + 8) roundings of sum |q| |k|, exp by 4 and a probability by twice the error of the
    worst score of its row; a sum over S tokens by S + 8 roundings. Codes: int16 queries and probabilities, half
    a step each."""
    group = q.shape[1] // k.shape[1]
    k, v = k.double().abs().repeat_interleave(group, 1), v.double().abs().repeat_interleave(group, 1)
    codes = case.kind in ("int8", "int4")
    magnitude = (q.abs() @ k.transpose(-1, -2)).amax(-1, keepdim=True) * scale
    score = (case.shape[5] + 40) * U * magnitude
    if isinstance(options.get("mask"), Tensor) and options["mask"].dtype != torch.bool:
        score = score + 8 * U * options["mask"].double().abs().amax(-1, keepdim=True)
    score = score + 8 * U * lse.abs().clamp(max=1e3).nan_to_num()[..., None]
    if codes:
        score = score + INT16 * q.abs().amax(-1, keepdim=True) * k.sum(-1).amax(-1)[..., None, None] * scale
    keys = p.shape[-1]
    allowed = (2 * score + (keys + 16) * U) * (p @ v)
    if codes:  # per split the largest weight is one step of 32767; v's scales are part of the weight, so bound it by p times the largest value
        allowed = allowed + 2 * INT16 * p.amax(-1, keepdim=True) * v.amax(-1, keepdim=True).amax(-2, keepdim=True) * keys
    rounding = testing.ROUNDOFF[case.q_dtype]
    return allowed + rounding * (out.abs() + allowed) + 1e-30, (score[..., 0] + (keys + 16) * U + U * lse.abs().nan_to_num())


def run(data: Data, row: str | None = None, q: Tensor | None = None) -> tuple[Tensor, Tensor]:
    q = data.q if q is None else q
    out = torch.full((*q.shape[:3], data.out.shape[-1]), 7.0, dtype=q.dtype)
    lse = torch.full(q.shape[:3], 7.0)
    call = dict(data.call)
    with forced(row):
        internals.decode(q, call.pop("k"), call.pop("v"), out, call.pop("scale"), lse=lse, **call)
    if row is not None:
        assert _C.last_kernel("decode") == row
    return out, lse


def kind_of(row: str) -> str:
    return row.split("_")[1]


ROWS = [row for row in testing.rows("decode") if kind_of(str(row["name"])) in KINDS]  # others: test_decode_prompts


row = fixture_of(ROWS)


@pytest.mark.core
def test_every_row_is_within_budget_of_float64(row: str, subtests: pytest.Subtests) -> None:
    for case in cases(kind_of(row)):
        with subtests.test(str(case)):
            data = make(case)
            out, lse = run(data, row)
            testing.assert_within(out, data.out, data.allowed, f"{case} by {row}")
            testing.assert_within(lse, data.lse, data.allowed_lse, f"lse of {case} by {row}")


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_all_instruction_sets_agree_bit_for_bit(kind: str, subtests: pytest.Subtests) -> None:
    rows = [str(row["name"]) for row in ROWS if row["available"] and kind_of(str(row["name"])) == kind]
    assert len(rows) > 1
    for case in cases(kind)[:6]:
        with subtests.test(str(case)):
            data = make(case)
            results = [run(data, row) for row in rows]
            for name, (out, lse) in zip(rows, results, strict=True):
                assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]), f"{name} differs from {rows[0]} on {case}"


@pytest.mark.parametrize("kind", KINDS)
def test_results_do_not_depend_on_threads_or_batch(kind: str) -> None:
    data = make(Case((3, 8, 2, 2, 1500, 64, 64), "plain", kind))
    together, _ = same_for_any_threads(lambda: run(data))
    alone = {name: value[1:2] if isinstance(value, Tensor) else value for name, value in data.call.items()}
    out, _ = run(Data(alone, data.q[1:2], data.out, data.lse, data.allowed, data.allowed_lse))
    assert torch.equal(out, together[1:2])


@pytest.mark.parametrize("kind", KINDS)
def test_both_layouts_give_the_same_bits(kind: str) -> None:
    case = Case((2, 8, 2, 1, 700, 64, 64), "causal", kind)
    data = make(case)
    other = {
        name: value.transpose(1, 2).contiguous().transpose(1, 2) if isinstance(value, Tensor) and value.dim() == 4 else value
        for name, value in data.call.items()
    }
    assert other["k"].stride(1) < other["k"].stride(2)
    assert torch.equal(run(data)[0], run(Data(other, data.q, data.out, data.lse, data.allowed, data.allowed_lse))[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 2, 7, 16])
def test_keys_and_values_may_be_parts_of_one_tensor(kind: str, length: int) -> None:
    """Heads that are not next to each other in memory: [B, S, H, k and v]. And every number of queries finds its own rows."""
    data = make(Case((2, 12, 3, length, 515, 64, 64), "causal", kind))
    k, v = data.call["k"], data.call["v"]
    assert isinstance(k, Tensor) and isinstance(v, Tensor)
    both = torch.cat([k, v], -1).transpose(1, 2).contiguous().transpose(1, 2)
    parts = {"k": both[..., : k.shape[-1]], "v": both[..., k.shape[-1] :]}
    assert parts["k"].stride(1) == 2 * k.shape[-1]
    other = Data(data.call | parts, data.q, data.out, data.lse, data.allowed, data.allowed_lse)
    assert torch.equal(run(data)[0], run(other)[0])
    for at in range(length):
        alone = Data(data.call | {"position": 515 - length + at}, data.q[:, :, at : at + 1], data.out, data.lse, data.allowed, data.allowed_lse)
        assert torch.equal(run(alone)[0], run(data)[0][:, :, at : at + 1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [3, 600])
def test_every_token_may_have_the_memory_of_one(kind: str, tokens: int) -> None:
    """Keys and values of token stride 0 with scales of their own."""
    data = make(Case((2, 8, 2, 1, tokens, 64, 64), "causal", kind))
    call = dict(data.call)
    for name in ("k", "v"):
        call[name] = call[name][:, :, :1].expand_as(call[name])
    dense = {name: value.contiguous() if isinstance(value, Tensor) else value for name, value in call.items()}
    results = [run(Data(each, data.q, data.out, data.lse, data.allowed, data.allowed_lse)) for each in (call, dense)]
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_an_empty_cache_gives_zeros() -> None:
    q, k, v, out, lse = torch.randn(1, 4, 2, 64), torch.empty(1, 2, 0, 64), torch.empty(1, 2, 0, 32), torch.ones(1, 4, 2, 32), torch.ones(1, 4, 2)
    internals.decode(q, k, v, out, 1.0, lse=lse)
    assert not out.any() and (lse == -torch.inf).all()


def test_keys_before_the_window_and_behind_the_query_are_not_read() -> None:
    k, v = torch.randn(1, 1, 2000, 64), torch.randn(1, 1, 2000, 64)
    q, out, again = torch.randn(1, 2, 1, 64), torch.empty(1, 2, 1, 64), torch.empty(1, 2, 1, 64)
    internals.decode(q, k, v, out, 0.1, causal=True, position=1500, window=100)
    k[:, :, :1280], v[:, :, :1280], k[:, :, 1536:], v[:, :, 1536:] = (torch.nan,) * 4  # whole splits
    internals.decode(q, k, v, again, 0.1, causal=True, position=1500, window=100)
    assert torch.equal(out, again)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_cache_hides_no_nan(kind: str, poison: float) -> None:
    k, v = torch.randn(1, 1, 40, 64), torch.randn(1, 1, 40, 64)
    q, out = torch.randn(1, 1, 1, 64), torch.empty(1, 1, 1, 64)
    bad = k.clone()
    bad[0, 0, 7, 3] = poison
    for keys, values, query in ((bad, v, q), (k, v, q * poison)):
        (k_codes, k_scale), (v_codes, v_scale) = quantized(keys, kind, False), quantized(values, kind, False)
        internals.decode(query, k_codes, v_codes, out, 0.1, k_scale, v_scale)
        assert out.isnan().all()
    bad = v.clone()
    bad[0, 0, 7, 3] = poison
    (k_codes, k_scale), (v_codes, v_scale) = quantized(k, kind, False), quantized(bad, kind, False)
    internals.decode(q, k_codes, v_codes, out, 0.1, k_scale, v_scale)
    assert out[..., :32].isnan().all()


@pytest.mark.core(*(row["name"] for row in testing.rows("kv_dequantize") if row["available"]))
@pytest.mark.parametrize("name", [str(row["name"]) for row in testing.rows("kv_quantize") if row["available"]])
@pytest.mark.parametrize("kind,rotate", [("int8", False), ("int8", True), ("int4", False), ("int4", True)])
@pytest.mark.parametrize("columns", [1, 31, 64, 80, 96, 128])
def test_codes_are_the_nearest_ones(name: str, kind: str, rotate: bool, columns: int) -> None:
    x = torch.randn(2, 3, 5, columns) * torch.logspace(-3, 3, 5)[:, None]
    x[0, 0, 0] = 0
    with forced(name):
        stored, scale = quantized(x, kind, rotate)
    exact = reference.rotate(x) if rotate else reference.pad(x.double())
    groups = exact.unflatten(-1, (scale.shape[-1], -1))
    levels = 127 if kind == "int8" else 8
    wanted = groups.abs().amax(-1) / levels
    half = 2.0**-11 if kind == "int4" else 4 * U
    assert ((scale.double().abs() - wanted).abs() <= half * wanted + 2.0**-25).all()
    error = (reference.decoded(stored, scale) - exact).abs().unflatten(-1, (scale.shape[-1], -1))
    # int4: the level opposite to the extreme is missing: half a step more there
    step = scale.double().abs()[..., None]
    assert (error <= step * (0.5 if kind == "int8" else 1.0) * (1 + 2.0**-10) + 1e-6 * exact.abs().amax()).all()
    with forced(name.replace("kv_quantize", "kv_dequantize")):
        back = torch.empty(x.shape)
        torch.ops.lowbit.kv_dequantize_(stored, scale, back, rotate)
        decoded = reference.decoded(stored, scale)
        wanted_back = reference.rotate(decoded) if rotate else decoded
        assert (back.double() - wanted_back[..., :columns]).abs().max() <= 32 * U * exact.abs().amax()


def test_rotating_spreads_an_outlier_channel() -> None:
    x = torch.randn(1, 1, 200, 128)
    x[..., 5] *= 30
    error = []
    for rotate in (False, True):
        stored, scale = quantized(x, "int4", rotate)
        back = torch.empty(x.shape)
        torch.ops.lowbit.kv_dequantize_(stored, scale, back, rotate)
        q = torch.randn(1, 1, 16, 128)
        error.append(((back - x) @ q[0, 0].T).square().mean().item())
    assert error[1] < error[0]


Q, K, V = torch.randn(1, 4, 1, 64), torch.randn(1, 2, 10, 64), torch.randn(1, 2, 10, 64)
CODES, SCALE = torch.zeros(1, 2, 10, 64, dtype=torch.int8), torch.ones(1, 2, 10, 1)


@pytest.mark.parametrize(
    "change,error,text",
    [
        ({"q": torch.randn(4, 1, 64)}, ValueError, r"decode: query must have shape \[B, Hq, L, E\], got \[4, 1, 64\]"),
        ({"q": Q.double()}, TypeError, "decode: query must be float32, bfloat16 or float16, got float64"),
        ({"q": torch.randn(1, 3, 1, 64), "out": torch.empty(1, 3, 1, 64)}, ValueError, "heads of query must be a multiple of those of key, got 3 and 2"),
        ({"k": K.double()}, TypeError, "value must have the dtype of key"),
        ({"k": K.double(), "v": V.double()}, TypeError, "key must be float32, bfloat16, float16, int8 or uint8"),
        ({"k": K[..., :32]}, ValueError, r"key must have shape \[1, 2, 10, 64\], got \[1, 2, 10, 32\]"),
        ({"v": V[:, :, :5]}, ValueError, r"value must have shape \[1, 2, 10, 64\]"),
        ({"k": K.transpose(2, 3).contiguous().transpose(2, 3)}, ValueError, "key must be dense in its last dimension"),
        ({"k_scale": SCALE}, ValueError, "k_scale, v_scale and rotated must be left out"),
        ({"rotated": True}, ValueError, "k_scale, v_scale and rotated must be left out"),
        ({"k": CODES, "v": CODES}, TypeError, "k_scale must be float32 or float16"),
        ({"k": CODES, "v": CODES, "k_scale": SCALE, "v_scale": SCALE[:, :1]}, ValueError, r"v_scale must have shape \[1, 2, 10, 1\]"),
        ({"out": torch.empty(1, 4, 2, 64)}, ValueError, "out must have shape"),
        ({"out": torch.empty(1, 4, 1, 64).half()}, TypeError, "out must have the dtype of query"),
        ({"mask": torch.ones(1, 4, 1, 9, dtype=torch.bool)}, ValueError, r"mask must have shape \[1, 4, 1, 10\], got \[1, 4, 1, 9\]"),
        ({"mask": torch.ones(1, 4, 1, 10, dtype=torch.int32)}, TypeError, "mask must be bool or floating"),
        ({"sink": torch.ones(2)}, ValueError, r"sink must have shape \[4\]"),
        ({"window": -1}, ValueError, "window must be positive, or 0 for none, got -1"),
        ({"scale": float("nan")}, ValueError, "scale must be finite"),
        ({"lse": torch.empty(1, 4, 1, dtype=torch.float64)}, TypeError, "lse must be float32, got float64"),
    ],
)
def test_a_bad_argument_is_named(change: dict[str, object], error: type[Exception], text: str) -> None:
    out = torch.full((1, 4, 1, 64), 7.0)
    arguments = {"q": Q, "k": K, "v": V, "out": out, "scale": 1.0} | change
    with pytest.raises(error, match=text):
        internals.decode(**arguments)
    assert (out == 7).all()


def test_a_part_of_a_cache_is_read_and_written_as_a_view_of_it_would_be() -> None:
    random = torch.Generator().manual_seed(1)
    q, x = torch.randn(1, 4, 2, 64, generator=random), torch.randn(1, 2, 3, 64, generator=random)
    caches = [(torch.full((1, 2, 10, 64), 7, dtype=torch.int8), torch.full((1, 2, 10, 1), float("nan"))) for _ in range(2)]
    results = []
    for (codes, scale), as_views in zip(caches, (True, False), strict=True):
        for first in (0, 3):
            if as_views:
                torch.ops.lowbit.kv_quantize_(x, codes[:, :, first : first + 3], scale[:, :, first : first + 3], False)
            else:
                torch.ops.lowbit.kv_quantize_(x, codes, scale, False, first)
        k, s = (codes[:, :, :6], scale[:, :, :6]) if as_views else (codes, scale)
        options = {} if as_views else {"length": 6}
        results.append(torch.ops.lowbit.decode(q, k, k, 0.1, s, s, False, True, 4, 0, 64, **options))
    assert torch.equal(*results) and results[0].isfinite().all()
    assert torch.equal(caches[0][0], caches[1][0]) and (caches[1][0][:, :, 6:] == 7).all()


def test_a_part_that_is_not_there_is_refused() -> None:
    x = torch.randn(1, 2, 10, 64)
    with pytest.raises(ValueError, match="decode: length must be at most the number of keys, 10, got 11"):
        torch.ops.lowbit.decode(Q, K, V, 1.0, None, None, False, False, 0, 0, 64, length=11)
    with pytest.raises(ValueError, match="kv_quantize: first must leave room for 10 rows of 10, got 1"):
        torch.ops.lowbit.kv_quantize_(x, CODES, SCALE, False, 1)
    with pytest.raises(ValueError, match=f"kv_quantize: first must leave room for 10 rows of 10, got {2**63 - 1}"):
        torch.ops.lowbit.kv_quantize_(x, CODES, SCALE, False, 2**63 - 1)


def test_quantizing_checks_its_tensors() -> None:
    x = torch.randn(1, 2, 10, 64)
    with pytest.raises(ValueError, match=r"kv_quantize: codes must have shape \[1, 2, 10, 64\], got \[1, 2, 10, 32\]"):
        torch.ops.lowbit.kv_quantize_(x, CODES[..., :32], SCALE, False)
    with pytest.raises(TypeError, match="kv_quantize: x must be float32, bfloat16 or float16"):
        torch.ops.lowbit.kv_quantize_(x.double(), CODES, SCALE, False)
    with pytest.raises(TypeError, match="codes must be int8 or uint8"):
        torch.ops.lowbit.kv_quantize_(x, CODES.int(), SCALE, False)
    with pytest.raises(ValueError, match="head dimensions of codes must be 1..512, got 600"):
        torch.ops.lowbit.kv_quantize_(torch.randn(1, 1, 1, 600), torch.zeros(1, 1, 1, 608, dtype=torch.int8), torch.zeros(1, 1, 1, 1), False)


def test_score_programs_run_at_the_position_of_the_query() -> None:
    score, mask = ProgramBuilder(), ProgramBuilder()
    distance = score.op("sub", score.op("q"), score.op("k"))
    score_mod = score.finish(score.op("add", score.op("score"), score.convert(distance, "float")))
    mask_mod = mask.finish(mask.op("le", mask.op("k"), mask.op("q")))
    q, k, v = torch.randn(1, 4, 3, 64), torch.randn(1, 2, 600, 64), torch.randn(1, 2, 600, 64)
    out = torch.empty(1, 4, 3, 64)
    internals.decode(q, k, v, out, 0.125, position=300, score_mod=score_mod, mask_mod=mask_mod)
    bias = (torch.arange(3)[:, None] + 300 - torch.arange(600)).expand(1, 4, 3, 600).float()
    wanted, _, _ = reference.decode(q, k, v, 0.125, causal=True, position=300, mask=bias)
    assert (out - wanted).abs().max() < 1e-4
