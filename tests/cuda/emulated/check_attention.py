# SPDX-License-Identifier: Apache-2.0
"""Attention on the emulated GPU: within budgets of float64, the same bits in any order of threads, errors in words."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attention_calls import (
    BY_WARPGROUPS,
    CASES,
    ROWS,
    WGMMA,
    AttentionCase,
    assert_right,
    expected,
    make_data,
    rows_of_warpgroups,
    run,
)
from settings import forced

import lowbit
from lowbit import _C
from lowbit.devices import simulated
from lowbit.score.program_cache import bind

simulated.enable()
DEVICE = "lowbit_sim:1"
NO_MODS = ([], [], [], [], [], (128, 128), None, True, False)


@contextlib.contextmanager
def row(name: str) -> Iterator[None]:
    with forced(name + "_sim"), torch.autograd.set_multithreading_enabled(False):  # of this thread, in which autograd is to stay
        yield


def forward(*tensors: torch.Tensor, scale: float = 0.125, causal: bool = False, mods: tuple[object, ...] = NO_MODS) -> tuple[torch.Tensor, ...]:
    with row(ROWS[0]):
        results = torch.ops.lowbit.attention_forward(*(t.to(DEVICE) for t in tensors), scale, causal, None, 0.0, None, *mods)
    return tuple(result.cpu() for result in results)


def heads(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(1, 1, *shape).to(dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_calls_are_within_budget_of_float64(case: AttentionCase) -> None:
    data = make_data(case)
    assert_right(case, run(case, data, DEVICE, "_sim"), expected(case, data))


@pytest.mark.parametrize("case", BY_WARPGROUPS, ids=str)
def test_products_of_warpgroups_are_within_budget_of_float64(case: AttentionCase) -> None:
    data = make_data(case)
    assert_right(case, run(case, data, DEVICE, "_sim", rows_of_warpgroups(case)), expected(case, data))


@pytest.mark.parametrize(
    "case, rows, words",
    [
        (CASES[5], (WGMMA[0], None), "head dims of queries above 128"),
        (CASES[6], (WGMMA[0], None), "head dims of values that are neither 64 nor 128"),
        (CASES[13], (WGMMA[0], None), "blocks smaller than its tiles"),
        (CASES[17], (WGMMA[0], None), "a mod that gathers, and head dims of values of 64"),
        (CASES[6], (ROWS[0], WGMMA[1]), "head dims that are neither 64 nor 128"),
        (CASES[13], (ROWS[0], WGMMA[1]), "blocks smaller than its tiles"),
        (CASES[14], (ROWS[0], WGMMA[1]), "a score_mod that gathers"),
    ],
    ids=str,
)
def test_what_warpgroups_do_not_serve_is_refused_by_name(case: AttentionCase, rows: tuple[str, str | None], words: str) -> None:
    with pytest.raises(NotImplementedError, match=words):
        run(case, make_data(case), DEVICE, "_sim", rows)


@pytest.mark.parametrize(("case", "rows"), [*((CASES[i], ROWS) for i in (0, 3, 13, 16)), (BY_WARPGROUPS[-2], WGMMA)], ids=str)
def test_any_order_of_threads_gives_the_same_bits(case: AttentionCase, rows: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for seed in ("1", "2"):
        monkeypatch.setenv("LOWBIT_EMULATED_SEED", seed)
        results.append(run(case, make_data(case), DEVICE, "_sim", rows))
    assert all(torch.equal(other[name], tensor) for other in results[1:] for name, tensor in results[0].items())


def test_rows_with_inf_or_nan_alone_are_not_finite() -> None:
    q, k, v = heads(70, 64), heads(60, 64), heads(60, 64)
    q[..., 3, 5], q[..., 66, 5] = torch.nan, torch.inf
    out, lse, _ = forward(q, k, v)
    wrong = torch.zeros(70, dtype=torch.bool)
    wrong[[3, 66]] = True
    assert torch.equal(out[0, 0].isfinite().all(-1), ~wrong) and torch.equal(lse[0, 0].isfinite(), ~wrong)


def test_few_that_dropout_leaves_have_no_inf_in_float16() -> None:
    """Powers of keys behind the first tile are e^5, and those that stay count a thousand times."""
    q, k, v = torch.ones(1, 1, 64, 32).half(), torch.zeros(1, 1, 400, 32).half(), torch.rand(1, 1, 400, 32).half()
    k[:, :, 64:] = 5 / 32
    options = 1.0, False, None, 0.999, torch.tensor(3), *NO_MODS[:7], False, False
    with row(ROWS[0]):
        out = torch.ops.lowbit.attention_forward(*(t.to(DEVICE) for t in (q, k, v)), *options[:4], options[4].to(DEVICE), *options[5:])[0].cpu()
    wanted = torch.ops.lowbit.attention_forward(*(t.float() for t in (q, k, v)), *options)[0]
    assert wanted.any()
    torch.testing.assert_close(out.float(), wanted, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("factor", [1e-20, 1e15])
def test_tiny_and_huge_scores(factor: float) -> None:
    case = AttentionCase("extreme", (1, 1, 1, 70, 70, 64, 64), scale=factor)
    data = make_data(case)
    got, wanted = run(case, data, DEVICE, "_sim"), expected(case, data)
    if factor < 1:
        assert_right(case, got, wanted)
    else:  # one score takes all, and float32 says which where it is not close
        assert torch.equal(got["narrow"].double(), wanted["out"][0]) and all(t.isfinite().all() for t in got.values())


def test_rows_that_see_nothing_are_zero_and_have_no_gradient() -> None:
    case = AttentionCase("nothing", (1, 1, 1, 70, 70, 64, 64), mask_mod=lambda b, h, q, k: (q > 9) & (k > 20))
    got = run(case, make_data(case), DEVICE, "_sim")
    for name in ("out", "narrow", "grad_q"):
        assert not got[name][:, :, :10].any() and got[name][:, :, 10:].any(-1).all()
    assert (got["lse"][..., :10] == -torch.inf).all() and (got["largest"][..., :10] == -torch.inf).all()
    assert not got["grad_k"][:, :, :21].any() and not got["grad_v"][:, :, :21].any()


def test_no_queries_and_no_keys() -> None:
    assert forward(heads(0, 64), heads(9, 64), heads(9, 64))[0].shape == (1, 1, 0, 64)
    out, lse, _ = forward(heads(9, 64), heads(0, 64), heads(0, 64))
    assert not out.any() and (lse == -torch.inf).all()
    q, k, out, lse = (t.to(DEVICE) for t in (heads(0, 64), heads(9, 64), heads(0, 64), torch.zeros(1, 1, 0)))
    with row(ROWS[1]):
        grads = torch.ops.lowbit.attention_backward(q, k, k, out, lse, out, None, 1.0, False, None, 0.0, None, [], [], [], *NO_MODS[2:7], False, False)
    assert not any(grad.cpu().any() for grad in grads)


LISTS = torch.tensor([[[2, 1]]]), torch.tensor([[[[0, 1], [1, 0]]]]), torch.tensor([[[1, 0]]]), torch.tensor([[[[1, 0], [0, 0]]]])


def blocks(**changed: int) -> list[torch.Tensor]:
    """Block 1 of the first row is in both lists: it is full, and its mask is not asked."""
    lists = [t.to(torch.int32) for t in LISTS]
    for index, value in changed.items():
        lists[int(index[1:])].view(-1)[0] = value
    return [t.to(DEVICE) for t in lists]


def test_a_block_of_both_lists_is_full() -> None:
    q, k, v = heads(64, 64), heads(64, 64), heads(64, 64)
    mask = bind("test", lambda b, h, q, k: (q + k) % 2 == 0, mask=True)
    lse = forward(q, k, v, mods=([], [], mask.code, [], blocks(), (32, 32), None, True, False))[1]
    place = torch.arange(64)
    seen = (place[:, None] + place) % 2 == 0
    seen[:32, 32:], seen[32:, :32] = True, False
    scores = (q[0, 0].double() @ k[0, 0].double().T * 0.125).masked_fill(~seen, -torch.inf)
    torch.testing.assert_close(lse[0, 0].double(), scores.logsumexp(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("changed", [{"_0": 3}, {"_1": 2}, {"_1": -1}, {"_3": 7}])
def test_lists_that_name_no_block_end_the_launch(changed: dict[str, int]) -> None:
    q = heads(64, 64)
    with pytest.raises(RuntimeError, match="prepare of classes of blocks of attention, 2 CTAs of 128 threads failed: CUDA_ERROR_LAUNCH_FAILED"):
        forward(q, q, q, mods=([], [], [], [], blocks(**changed), (32, 32), None, True, False))


@pytest.mark.parametrize("size, fails", [(40, False), (39, True)])
def test_a_gather_out_of_range_ends_the_launch(size: int, fails: bool) -> None:
    """Also where a tile is larger than what there is of it: nothing is asked about keys that are not there."""
    table, q = torch.randn(size), heads(40, 64)
    score = bind("test", lambda s, b, h, q, k: s + table[k], mask=False)
    mods = (score.code, [table.to(DEVICE)], *NO_MODS[2:])
    told = contextlib.nullcontext() if not fails else pytest.raises(RuntimeError, match="attention_forward of attention forward of bfloat16, head dims 64 and 64, a score_mod.*LAUNCH_FAILED")
    with told:
        assert forward(q, q, q, mods=mods)[0].isfinite().all()


@pytest.mark.parametrize(
    "q, words",
    [
        (torch.zeros(1, 1, 8, 64), "inputs are neither bfloat16 nor float16"),
        (heads(8, 40), "head dims must be multiples of 16, at most 256"),
        (heads(8, 272), "head dims must be multiples of 16, at most 256"),
        (heads(8, 68)[..., :64], "rows of q, k and v must begin at multiples of 16 bytes"),
    ],
)
def test_what_is_not_served_is_refused_by_name(q: torch.Tensor, words: str) -> None:
    there = torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device=DEVICE)
    with row(ROWS[0]), pytest.raises(NotImplementedError, match=words):
        torch.ops.lowbit.attention_forward(there, there, there, 1.0, False, None, 0.0, None, *NO_MODS)


def test_the_gradient_of_a_mask_is_refused_by_name() -> None:
    q = heads(8, 64).to(DEVICE).requires_grad_()
    mask = torch.zeros(8, 8, dtype=torch.bfloat16).to(DEVICE).requires_grad_()
    with row(ROWS[0]):
        out = lowbit.scaled_dot_product_attention(q, q, q, mask)
    with row(ROWS[1]), pytest.raises(NotImplementedError, match="a gradient of mask is wanted"):
        out.sum().backward()


def test_functions_with_their_gradients() -> None:
    """flex_attention with a learned bias and a block mask, and packed documents; a result of transposed heads stays so."""
    torch.manual_seed(0)
    bias = torch.randn(2, 256)
    mask = lowbit.create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128)

    def results(device: str) -> list[torch.Tensor]:
        torch.manual_seed(1)
        q, k, v = (torch.randn(1, 128, 2, 64).bfloat16().transpose(1, 2).to(device).requires_grad_() for _ in range(3))
        learned = bias.clone().to(device).requires_grad_()
        there = mask if device == "cpu" else mask.to(device)
        calls = contextlib.nullcontext() if device == "cpu" else row(ROWS[0])
        with calls:
            out = lowbit.flex_attention(q, k, v, lambda s, b, h, q, k: s + learned[h, q - k + 128], there)
            packed = lowbit.flex_attention(q, k, v, cu_seqlens=torch.tensor([0, 50, 128]).to(device))
        assert out.transpose(1, 2).is_contiguous()
        with contextlib.nullcontext() if device == "cpu" else row(ROWS[1]):
            (out.sum() + (packed * packed.detach()).sum()).backward()
        assert device == "cpu" or _C.last_kernel("attention_backward") == ROWS[1] + "_sim"
        return [t.detach().cpu().float() for t in (out, packed, q.grad, k.grad, v.grad, learned.grad)]

    for here, there in zip(results("cpu"), results(DEVICE), strict=True):
        torch.testing.assert_close(there, here, rtol=2e-2, atol=2e-2 * here.abs().max().item())


def test_a_block_mask_is_made_by_the_cpu_and_moved() -> None:
    made, here = (lowbit.create_block_mask(lambda b, h, q, k: q - k < 77, None, None, 300, 200, device=device) for device in (DEVICE, None))
    assert made.kv_indices.device == torch.device(DEVICE) and made.seq_lengths == here.seq_lengths
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices"):
        assert torch.equal(getattr(made, name).cpu(), getattr(here, name)), name


def test_launches_of_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain forward is one, without a block mask nothing is prepared; no memory is left."""
    case = replace(CASES[0], shape=(1, 2, 1, 200, 100, 64, 64))
    data = make_data(case)
    run(case, data, DEVICE, "_sim")
    log, before = tmp_path / "log", simulated.live_bytes(DEVICE)
    monkeypatch.setenv("LOWBIT_EMULATED_LOG", str(log))
    run(case, data, DEVICE, "_sim")
    launches = [line.split()[1:3] for line in log.read_text().splitlines() if line.startswith("launch")]
    assert launches == [["attention_forward", "4"]] * 2 + [["row_statistics", "100"], ["attention_queries", "8"], ["attention_keys", "2"]]
    assert simulated.live_bytes(DEVICE) == before


def test_barriers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run by test_emulated.py once as it is, and for each barrier without it, what its file is for."""
    of = os.environ.get("LOWBIT_BARRIERS_OF")
    more_tiles = BY_WARPGROUPS[-2]
    calls = {"forward_wgmma": (more_tiles, (WGMMA[0], None)), "backward_wgmma": (more_tiles, (ROWS[0], WGMMA[1])), "others": (replace(CASES[11], sink=True), None)}
    for case, rows in calls.values() if of is None else [calls.get(of, calls["others"])]:
        data = make_data(case)
        wanted = expected(case, data)
        for seed in ("0", "1", "2", "3"):
            monkeypatch.setenv("LOWBIT_EMULATED_SEED", seed)
            assert_right(case, run(case, data, DEVICE, "_sim", rows), wanted)
            if rows is None:
                test_a_block_of_both_lists_is_full()
