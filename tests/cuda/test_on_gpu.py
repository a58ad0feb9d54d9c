# SPDX-License-Identifier: Apache-2.0
"""Tests that need silicon: the bits of the CPU, streams, CUDA graphs, several devices, torch's GradScaler."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from attention_calls import BY_WARPGROUPS as ATTENTION_BY_WARPGROUPS
from attention_calls import CASES as ATTENTION
from attention_calls import AttentionCase, assert_right, expected, make_data, rows_of_warpgroups
from attention_calls import run as run_attention
from decode_calls import CASES as DECODE
from decode_calls import DecodeCase
from decode_calls import assert_right as assert_decode_right
from decode_calls import make_data as make_decode_data
from decode_calls import run as run_decode
from linear_calls import BY_WARPGROUPS, CASES, allowed_by_warpgroups, row_of, run
from optim_steps import RULES, step

import lowbit
from lowbit.testing import STATE_FORMATS, LinearCase, assert_within, cached_data

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU: tests/cuda/test_emulated.py runs the same kernels on the host"),
]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("format", STATE_FORMATS)
def test_bits_are_those_of_the_cpu(name: str, format: str) -> None:
    more = dict(grad_scale=torch.tensor(8.0), found_inf=torch.tensor(0.0), seed=7)
    block_size = 128 if format == "dynamic4" else 256
    here = step(f"optim_step_{format}_scalar", name, format, block_size, "cpu", **more)
    there = step(f"optim_step_{format}_cuda", name, format, block_size, "cuda", **more)
    for a, b in zip(here, there, strict=True):
        assert torch.equal(a, b)


def trained(steps: int, *, graph: bool = False, stream: bool = False, device: str = "cuda") -> list[torch.Tensor]:
    torch.manual_seed(0)
    params = [torch.randn(300, 100, device=device).requires_grad_(), torch.randn(5000, device=device).bfloat16().requires_grad_()]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = lowbit.optim.AdamW8bit(params, lr=1e-2)
    torch.cuda.synchronize(device)  # what was made so far was made on another stream
    with torch.cuda.stream(torch.cuda.Stream(device) if stream else torch.cuda.current_stream(device)):
        optimizer.step()
        if graph:
            recorded = torch.cuda.CUDAGraph()
            with torch.cuda.graph(recorded):
                optimizer.step()
            for _ in range(steps - 1):
                recorded.replay()
        else:
            for _ in range(steps - 1):
                optimizer.step()
        torch.cuda.synchronize(device)
    return [param.detach().cpu() for param in params] + [s.cpu() for param in params for s in optimizer.state[param].values()]


def test_a_graph_replays_the_steps() -> None:
    for a, b in zip(trained(5), trained(5, graph=True), strict=True):
        assert torch.equal(a, b)


def test_steps_join_torchs_stream() -> None:
    for a, b in zip(trained(3), trained(3, stream=True), strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_another_device() -> None:
    for a, b in zip(trained(3), trained(3, device="cuda:1"), strict=True):
        assert torch.equal(a, b)


def test_a_grad_scaler_waits_for_nothing() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, device="cuda")
    optimizer, scaler = lowbit.optim.AdamW8bit(model.parameters(), min_8bit_size=64), torch.amp.GradScaler("cuda")
    before = model.weight.detach().clone()
    for x in (torch.randn(8, 64, device="cuda"), torch.full((8, 64), torch.inf, device="cuda")):
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert not torch.equal(model.weight, before) and model.weight.isfinite().all()  # the second was skipped
    assert optimizer.state[model.weight]["step"].item() == 1


@pytest.mark.parametrize("case", CASES, ids=str)
def test_linear_is_within_budget_of_the_float64_reference(case: LinearCase) -> None:
    data = cached_data(case)
    assert_within(run(case, "cuda", row_of(case, "cuda")), data.wanted, data.allowed, str(case))


of_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no NVIDIA GPU of compute capability 9.0"
)


@of_hopper
@pytest.mark.parametrize("case", [replace(case, n=case.n + 2112) for case in BY_WARPGROUPS], ids=str)
def test_products_of_warpgroups_are_within_budget_of_the_float64_reference(case: LinearCase) -> None:
    data = cached_data(case)
    first, second = (run(case, "cuda", "linear_wgmma_cuda") for _ in range(2))
    assert_within(first, data.wanted, allowed_by_warpgroups(case, data), str(case))
    assert torch.equal(first, second)


def test_a_model_is_quantized_there_called_in_a_graph_and_differentiated() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 96), torch.nn.ReLU(), torch.nn.Linear(96, 32)).cuda().bfloat16()
    there = copy.deepcopy(model).cpu()
    for each in (model, there):
        lowbit.quantize_(each, lowbit.int4_weight_only(group_size=32))
    assert torch.equal(model[0].weight.cpu(), there[0].weight)  # packed alike, in one layout
    x = torch.randn(5, 256, dtype=torch.bfloat16)
    static = x.cuda()
    with torch.inference_mode():
        wanted = there(x)
        torch.testing.assert_close(model(static).cpu(), wanted, rtol=2e-2, atol=2e-2)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(static)
        graph.replay()
        torch.testing.assert_close(y.cpu(), wanted, rtol=2e-2, atol=2e-2)
    static.requires_grad_()
    model(static).square().sum().backward()
    assert static.grad.isfinite().all() and static.grad.any()
    with torch.autocast("cuda", torch.bfloat16):
        assert model(torch.randn(3, 256, device="cuda")).dtype is torch.bfloat16


@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_attention_is_within_budget_of_float64(case: AttentionCase) -> None:
    data = make_data(case)
    first, second = (run_attention(case, data, "cuda") for _ in range(2))
    assert_right(case, first, expected(case, data))
    assert all(torch.equal(first[name], second[name]) for name in first)  # the same bits


@of_hopper
@pytest.mark.parametrize("case", ATTENTION_BY_WARPGROUPS, ids=str)
def test_attention_by_warpgroups_is_within_budget_of_float64(case: AttentionCase) -> None:
    data = make_data(case)
    first, second = (run_attention(case, data, "cuda", rows=rows_of_warpgroups(case)) for _ in range(2))
    assert_right(case, first, expected(case, data))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_flex_attention_in_a_graph_and_with_gradients() -> None:
    torch.manual_seed(0)
    bias = torch.randn(4, 1024, device="cuda", requires_grad=True)
    mask = lowbit.create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < 300), None, None, 512, 512, device="cuda")
    q, k, v = (torch.randn(2, 4, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def call() -> torch.Tensor:
        return lowbit.flex_attention(q, k, v, lambda s, b, h, q, k: s + bias[h, q - k + 512], mask)

    wanted = call().detach()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        call()
        with torch.cuda.graph(graph):
            out = call()
        out.zero_()
        graph.replay()
    torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
    call().sum().backward()
    assert all(t.grad.isfinite().all() and t.grad.any() for t in (q, k, v, bias))


def test_what_attention_does_not_serve_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="inputs are neither bfloat16 nor float16"):
        lowbit.flex_attention(*(torch.randn(1, 1, 8, 16, device="cuda") for _ in range(3)))


def attend(case: DecodeCase, device: str) -> torch.Tensor:
    torch.manual_seed(0)
    b, hq, hkv, _, length, e, ev = case.shape
    cache = lowbit.QuantizedKVCache(case.cache)
    cache.append(0, *(torch.randn(b, hkv, length, size).to(device, case.dtype) for size in (e, ev)))
    return cache.attend(0, torch.randn(b, hq, 1, e).to(device, case.dtype)).cpu()


@pytest.mark.parametrize("case", DECODE, ids=str)
def test_decode_is_within_budget_of_float64(case: DecodeCase) -> None:
    data = make_decode_data(case)
    first, second = (run_decode(case, data, "cuda") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert_decode_right(case, data, *first)


@pytest.mark.parametrize("case", [case for case in DECODE if isinstance(case.cache, str)], ids=str)
def test_a_cache_has_what_it_has_on_the_cpu(case: DecodeCase) -> None:
    torch.testing.assert_close(attend(case, "cuda"), attend(case, "cpu"), rtol=2e-2, atol=2e-2)


def test_a_graph_replays_a_step_over_a_cache() -> None:
    cache = lowbit.QuantizedKVCache("int8")
    cache.append(0, *(torch.randn(2, 2, 1000, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)))
    q = torch.randn(2, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    wanted = cache.attend(0, q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cache.attend(0, q)
    out.zero_()
    graph.replay()
    assert torch.equal(out, wanted)
