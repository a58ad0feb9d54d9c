# SPDX-License-Identifier: Apache-2.0
"""decode and the codes of a cache on the emulated GPU: within budgets of float64, the bits of the CPU where they are promised."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import attention_calls
import pytest
import torch
from attention_calls import FEW_QUERIES, AttentionCase
from decode_calls import BF16, CASES, DecodeCase, assert_right, make_data, run
from settings import forced
from tests import internals
from torch import Tensor

import lowbit
from lowbit import _C
from lowbit.devices import simulated
from lowbit.score.program_cache import bind

simulated.enable()
DEVICE = "lowbit_sim:1"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_calls_are_within_budget_of_float64(case: DecodeCase) -> None:
    data = make_data(case)
    assert_right(case, data, *run(case, data, DEVICE, "_sim"))


@pytest.mark.parametrize("case", FEW_QUERIES, ids=str)
def test_few_queries_of_attention_are_within_budget_of_float64(case: AttentionCase) -> None:
    data = attention_calls.make_data(case)
    got = attention_calls.run(case, data, DEVICE, "_sim", attention_calls.rows_of_few(case))
    attention_calls.assert_right(case, got, attention_calls.expected(case, data))


@pytest.mark.parametrize(
    "shape, options, words",
    [
        ((1, 8, 1, 5, 300, 64, 64), {}, "more than 32 queries of a head of keys"),
        ((1, 2, 1, 1, 256, 64, 64), {}, "256 keys or less"),
        ((1, 2, 1, 1, 300, 64, 64), {"dropout_p": 0.5}, "dropout"),
        ((1, 2, 1, 1, 300, 64, 64), {"mask_mod": lambda b, h, q, k: q >= k}, "a block mask"),
    ],
)
def test_what_attention_does_by_tiles_is_refused_by_name(shape: tuple[int, ...], options: dict[str, object], words: str) -> None:
    case = AttentionCase("", shape, **options)
    with pytest.raises(NotImplementedError, match=words):
        attention_calls.run(case, attention_calls.make_data(case), DEVICE, "_sim", attention_calls.rows_of_few(case))


def test_a_query_has_the_same_bits_in_any_batch() -> None:
    whole = CASES[0]
    data = make_data(whole)
    out, lse = run(whole, data, DEVICE, "_sim")
    alone = DecodeCase("alone", (1, *whole.shape[1:]), "int8")
    data.call = {name: value[1:] if isinstance(value, Tensor) else value for name, value in data.call.items()}
    data.q, data.out, data.lse = data.q[1:], data.out[1:], data.lse[1:]
    got = run(alone, data, DEVICE, "_sim")
    assert torch.equal(got[0], out[1:]) and torch.equal(got[1], lse[1:])


def test_keys_that_no_query_sees_are_not_read() -> None:
    case = DecodeCase("window", (1, 2, 1, 1, 640, 32, 32), "int8", options={"causal": True, "position": 450, "window": 100})
    data = make_data(case)
    before = run(case, data, DEVICE, "_sim")
    for name in ("k_scale", "v_scale"):
        data.call[name][:, :, :320], data.call[name][:, :, 451:] = torch.nan, torch.nan
    after = run(case, data, DEVICE, "_sim")
    assert torch.equal(before[0], after[0]) and before[0].isfinite().all()


def test_a_block_of_queries_reads_no_key_behind_its_last_or_before_its_window() -> None:
    """Four blocks of 16 queries; a scale that is nan is seen where its tile is read, also of a key that is hidden."""
    case = DecodeCase("prompt", (1, 1, 1, 64, 300, 32, 32), "int8", options={"causal": True, "position": 200, "window": 100})
    for keys, first, second in ((slice(232, 264), True, False), (slice(64, 128), False, True), (slice(0, 64), True, True)):
        data = make_data(case)
        data.call["v_scale"][:, :, keys] = torch.nan
        finite = run(case, data, DEVICE, "_sim")[0].isfinite().all(-1)[0, 0]
        assert finite[:32].all() == first and finite[32:].all() == second


@pytest.mark.parametrize("ev", [32, 64])  # by tiles, by warpgroups
def test_a_prompt_decodes_what_its_queries_see_and_a_tile_of_them_reads_no_more(ev: int) -> None:
    """Two tiles of 128 queries, over tiles of 64 keys: those from 64 to 448 are decoded."""
    case = DecodeCase("prompt", (1, 1, 1, 248, 600, 32, ev), "int8", options={"causal": True, "position": 200, "window": 100}, prompt=True)
    for keys, first, second in ((slice(0, 64), True, True), (slice(64, 128), False, True), (slice(384, 448), True, False), (slice(448, 600), True, True)):
        data = make_data(case)
        for name in ("k_scale", "v_scale"):
            data.call[name][:, :, keys] = torch.nan
        finite = run(case, data, DEVICE, "_sim")[0].isfinite().all(-1)[0, 0]
        assert finite[:128].all() == first and finite[128:].all() == second


@pytest.mark.parametrize("position, window, ev, kernel", [(120, 0, 32, "attention_forward"), (120, 0, 64, "attention_prompt_wgmma"),
                                                          (-100, 0, 32, ""), (0, 30, 64, "")])  # fmt: skip
def test_a_prompt_in_pieces_of_heads_has_the_bits_of_the_whole(
    position: int, window: int, ev: int, kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"causal": True, "position": position, "window": window}
    case = DecodeCase("pieces", (2, 6, 3, 70, 190, 64, ev), "int4", options=options, mask=BF16, sink=True, prompt=True,
                      score_mod=lambda s, b, h, q, k: s + 0.01 * (k - q) * (h + 1) * (b + 1))  # fmt: skip
    data = make_data(case)
    whole = run(case, data, DEVICE, "_sim")
    assert_right(case, data, *whole)
    log = tmp_path / "log"
    monkeypatch.setenv("LOWBIT_EMULATED_LOG", str(log))
    for heads, ctas in ((4, ["8", "4"]), (0, ["2"] * 6)):
        before = internals.max_decoded_bytes(2 * heads * 190 * (64 + ev))
        try:
            parts = run(case, data, DEVICE, "_sim")
        finally:
            internals.max_decoded_bytes(before)
        launches = [line.split()[1:3] for line in log.read_text().splitlines() if line.startswith("launch")]
        assert all(torch.equal(a, b) for a, b in zip(parts, whole, strict=True))
        if kernel:
            persist = kernel == "attention_prompt_wgmma"  # one for each of the 2 multiprocessors
            assert [count for name, count in launches if name == kernel] == ["2" if persist else count for count in ctas]
            assert [name for name, _ in launches].count("kv_dequantize") == 2 * len(ctas)
        log.unlink()


@pytest.mark.parametrize("prompt", [False, True])
def test_an_empty_cache_and_keys_that_are_all_hidden_give_zeros(prompt: bool) -> None:
    length = 70 if prompt else 2
    case = DecodeCase("nothing", (1, 2, 1, length, 70, 32, 32), "int8", options={"causal": True, "position": -length}, prompt=prompt)
    data = make_data(case)
    for keys in (70, 0):
        data.call |= {name: data.call[name][:, :, :keys] for name in ("k", "v", "k_scale", "v_scale")}
        out, lse = run(case, data, DEVICE, "_sim")
        assert not out.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("cache", ["int8", "int4"])
def test_a_cache_hides_no_nan(cache: str, poison: float) -> None:
    case = DecodeCase("nan", (1, 2, 1, 1, 40, 64, 64), cache, torch.float32)
    for name in ("k_scale", "v_scale", "q"):
        data = make_data(case)
        if name == "q":
            data.q[0, 0] *= poison
        else:
            data.call[name][0, 0, 7, 0] = torch.nan  # what kv_quantize makes of it
        out = run(case, data, DEVICE, "_sim")[0]
        assert out[:, :1, :, :32].isnan().all() and (name != "q" or out[:, 1].isfinite().all())


@pytest.mark.parametrize(
    "format, rotate, columns, dtype",
    [
        ("int8", False, 1, "float32"),
        ("int8", False, 59, "bfloat16"),
        ("int8", True, 59, "float16"),
        ("int4", False, 96, "float16"),
        ("int4", True, 96, "bfloat16"),
        ("int4", True, 128, "float32"),
    ],
)
def test_codes_have_the_bits_of_the_cpu(format: str, rotate: bool, columns: int, dtype: str) -> None:
    torch.manual_seed(0)
    x = (torch.randn(2, 2, 3, columns) * torch.logspace(-3, 3, 3)[:, None]).to(getattr(torch, dtype))
    x[0, 0, 0], x[0, 1, 1, 0], x[1, 1, 1, columns - 1] = 0, torch.nan, torch.inf
    padded = -(-columns // 32) * 32
    sizes = ((padded, torch.int8), (1, torch.float32)) if format == "int8" else ((padded // 2, torch.uint8), (padded // 32, torch.float16))
    results = []
    for device, suffix in (("cpu", "scalar"), (DEVICE, "cuda_sim")):
        codes, scale = (torch.zeros(2, 2, 3, size, dtype=kind).to(device) for size, kind in sizes)
        back = torch.zeros(x.shape).to(device)
        with forced(f"kv_quantize_{suffix}"):
            torch.ops.lowbit.kv_quantize_(x.to(device), codes, scale, rotate=rotate)
        with forced(f"kv_dequantize_{suffix}"):
            torch.ops.lowbit.kv_dequantize_(codes, scale, back, rotate)
        results.append([t.cpu() for t in (codes, scale, back)])
    for here, there in zip(*results, strict=True):
        assert torch.equal(here.nan_to_num(12345.0), there.nan_to_num(12345.0))


def test_a_cache_on_the_device_attends_as_on_the_cpu() -> None:
    torch.manual_seed(0)
    k, v, q = torch.randn(1, 2, 70, 64), torch.randn(1, 2, 70, 64), torch.randn(1, 4, 1, 64)
    for format in ("int8", "int4"):
        results = []
        for device in ("cpu", DEVICE):
            cache = lowbit.QuantizedKVCache(format)
            cache.append(0, k.to(device), v.to(device))
            cache.append(0, k[:, :, :1].to(device), v[:, :, :1].to(device))
            results.append(cache.attend(0, q.to(device)).cpu())
        torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-4)


def test_a_prompt_is_offered_to_its_rows_first() -> None:
    names = [row["name"] for row in _C.kernels("decode") if row["name"].endswith("_cuda_sim")]
    assert [name.startswith("decode_prompt_") for name in names] == [True] * 4 + [False] * 4


def test_a_call_is_two_launches_and_leaves_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_data(CASES[0])
    run(CASES[0], data, DEVICE, "_sim")
    log, before = tmp_path / "log", simulated.live_bytes(DEVICE)
    monkeypatch.setenv("LOWBIT_EMULATED_LOG", str(log))
    run(CASES[0], data, DEVICE, "_sim")
    launches = [line.split()[:4] for line in log.read_text().splitlines() if line.startswith("launch")]
    assert launches == [["launch", "decode", "12", "128"], ["launch", "combine", "16", "128"]]
    log.unlink()
    run(replace(CASES[0], shape=(2, 8, 2, 1, 128, 64, 64)), make_data(replace(CASES[0], shape=(2, 8, 2, 1, 128, 64, 64))), DEVICE, "_sim")
    alone = [line.split()[:4] for line in log.read_text().splitlines() if line.startswith("launch")]
    assert ["launch", "decode", "4", "128"] in alone and not any("combine" in line for line in alone)
    assert simulated.live_bytes(DEVICE) == before


@pytest.mark.parametrize("size, fails", [(40, False), (39, True)])
def test_a_gather_out_of_range_ends_the_launch(size: int, fails: bool) -> None:
    """Nothing is asked about keys that are not there, or that causality hides."""
    table = torch.randn(size)
    case = DecodeCase("gather", (1, 2, 1, 1, 60, 64, 64), "int8", options={"causal": True, "position": 39}, score_mod=lambda s, b, h, q, k: s + table[k.clamp(max=39)])
    data = make_data(case) if not fails else make_data(replace(case, score_mod=None))
    data.call["score_mod"] = bind("test", lambda s, b, h, q, k: s + table[k], mask=False)
    told = contextlib.nullcontext() if not fails else pytest.raises(RuntimeError, match="decode of decode of int8 codes.*, a score_mod.*LAUNCH_FAILED")
    with told:
        assert_right(case, data, *run(case, data, DEVICE, "_sim"))


@pytest.mark.parametrize(
    "case, words",
    [
        (DecodeCase("", (1, 1, 1, 1, 3, 264, 64), "int8"), "a head dimension above 256"),
        (DecodeCase("", (1, 1, 1, 1, 3, 36, 32), torch.bfloat16), "multiples of 8"),
        (DecodeCase("", (1, 1, 1, 64, 3, 32, 32), "int8", prompt=True), "64 queries or less"),
        (DecodeCase("", (1, 1, 1, 65, 3, 32, 32), "int4", torch.float32, prompt=True), "neither bfloat16 nor float16"),
        (DecodeCase("", (1, 1, 1, 65, 3, 40, 32), "int8", prompt=True), "multiples of 16, at most 256"),
        (DecodeCase("", (1, 1, 1, 65, 3, 32, 32), torch.bfloat16, torch.float16, prompt=True), "q has another dtype than keys and values"),
        (DecodeCase("", (1, 1, 1, 65, 3, 32, 32), "int8", options={"position": 2**30}, prompt=True), "positions beyond 2.30"),
        (
            DecodeCase("", (1, 1, 1, 65, 3, 32, 32), "int4", options={"window": 9}, prompt=True, score_mod=lambda s, b, h, q, k, t: s + t[k], captured=((3,),)),
            "a mod that gathers by query or key",
        ),
        (DecodeCase("", (1, 1, 1, 1, 3, 32, 32), torch.bfloat16, torch.float32), "q has another dtype than keys and values"),
    ],
)
def test_what_is_not_served_is_refused_by_name(case: DecodeCase, words: str) -> None:
    with pytest.raises(NotImplementedError, match=words):
        run(case, make_data(case), DEVICE, "_sim")


def test_barriers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run by test_emulated.py once as it is and once without each barrier."""
    of_one_split = next(case for case in CASES if case.name == "bfloat16, a prompt")
    for case in (CASES[0], CASES[1], of_one_split):
        data, results = make_data(case), []
        for seed in ("0", "1", "2"):
            monkeypatch.setenv("LOWBIT_EMULATED_SEED", seed)
            results.append(run(case, data, DEVICE, "_sim"))
            assert_right(case, data, *results[-1])
        assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(other, results[0], strict=True))
