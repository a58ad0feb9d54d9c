# SPDX-License-Identifier: Apache-2.0
"""A quantized cache inside torch.compile(fullgraph=True): the steps of eager mode, written in place, in a handful of graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import aot_module_simplified
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import lowbit


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def step(cache: lowbit.QuantizedKVCache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    for layer in range(2):
        cache.append(layer, k, v)
        q = cache.attend(layer, q * 2) + 1
    return q


def tensors(length: int) -> list[Tensor]:
    return [torch.randn(2, heads, length, 32) for heads in (4, 2, 2)]


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_steps_are_those_of_eager_mode(format: str, backend: str) -> None:
    """Over 256 tokens the storage grows; the length and the capacity become symbols, so that graphs do not follow them."""
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    eager, traced = lowbit.QuantizedKVCache(format), lowbit.QuantizedKVCache(format)
    for cache in (eager, traced):
        torch.manual_seed(0)
        step(cache, *tensors(250))
    for _ in range(12):
        arguments = tensors(1)
        torch.testing.assert_close(compiled(traced, *arguments), step(eager, *arguments), atol=1e-5, rtol=1e-5)
    assert traced.length == eager.length == 262
    for mine, theirs in zip(traced.layers, eager.layers, strict=True):
        assert torch.equal(mine.keys(), theirs.keys()) and torch.equal(mine.values(), theirs.values())
    assert counter.frame_count <= 5


def test_prompts_crop_and_reorder_compile() -> None:
    def run(cache: lowbit.QuantizedKVCache, q: Tensor, k: Tensor, v: Tensor, index: Tensor) -> Tensor:
        cache.append(0, k, v)
        prompt = cache.attend(0, q, window=30)
        cache.reorder(index)
        cache.crop(-3)
        return prompt, cache.attend(0, q[:, :, :5], mask=q[:, :1, :1, :1] > 0), cache.layer(0).keys()

    index, arguments = torch.tensor([1, 1]), tensors(50)
    results = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        cache = lowbit.QuantizedKVCache("int8")
        cache.append(0, *(tensor + 1 for tensor in arguments[1:]))
        results.append(function(cache, *arguments, index))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


def test_a_compiled_step_copies_no_cache() -> None:
    """Functionalization hands copies of what an op writes to; Inductor must write in place again. Counted: bytes that the step allocates."""
    cache, arguments = lowbit.QuantizedKVCache("int8"), tensors(1)
    step(cache, *tensors(5000))
    compiled = torch.compile(step, fullgraph=True)
    for _ in range(4):
        compiled(cache, *arguments)
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        compiled(cache, *arguments)
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert 0 < largest < 100_000 < cache.layer(0).nbytes


def test_decode_takes_symbolic_lengths() -> None:
    seen: list[torch.fx.GraphModule] = []

    def look(graph: torch.fx.GraphModule, example: list[Any]) -> Any:
        return aot_module_simplified(graph, example, fw_compiler=lambda inner, _: seen.append(inner) or inner)

    def run(q: Tensor, k: Tensor) -> Tensor:
        return torch.ops.lowbit.decode(q, k, k, 0.5, None, None, False, True, k.shape[2] - 1, 0, k.shape[3])

    compiled = torch.compile(run, fullgraph=True, backend=look, dynamic=True)
    for length in (33, 70, 200):
        q, k = torch.randn(1, 4, 1, 32), torch.randn(1, 2, length, 32)
        torch.testing.assert_close(compiled(q, k), run(q, k))
    assert len(seen) == 1
