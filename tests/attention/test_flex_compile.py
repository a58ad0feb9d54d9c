# SPDX-License-Identifier: Apache-2.0
"""flex_attention inside torch.compile(fullgraph=True) and checkpointing: as in eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from lowbit import AuxRequest, create_block_mask, flex_attention


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def qkv(length: int = 70, kv_heads: int = 4, requires_grad: bool = True) -> list[Tensor]:
    return [torch.randn(2, heads, length, 16, requires_grad=requires_grad) for heads in (4, kv_heads, kv_heads)]


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, ids: Tensor, mask: Any, sink: Tensor | None = None) -> tuple[Tensor, ...]:
    out, aux = flex_attention(
        q, k, v, lambda s, b, h, i, j: torch.where(ids[i] >= ids[j], s + bias[h, i, j], s), mask, return_aux=AuxRequest(lse=True, max_scores=True),
        enable_gqa=True, sink=sink,
    )  # fmt: skip
    return out * 2, aux.lse, aux.max_scores


@pytest.mark.parametrize("first", ["torch.compile(attend, fullgraph=True, backend='eager')(q)", "lowbit.attention.install()"])
def test_torchs_op_is_its_own_until_the_first_compiled_call(python: Callable[..., str], first: str) -> None:
    """Importing and eager calls change nothing of torch's table of kernels."""
    code = f"""
import torch, lowbit, lowbit.attention.installation
from torch._higher_order_ops.flex_attention import flex_attention as op
attend = lambda q: lowbit.flex_attention(q, q, q, lambda s, b, h, i, j: s + i - j)
q = torch.randn(1, 2, 8, 16)
eager = attend(q)
ours = lambda: [f.__module__ for f in [*op.py_kernels.values(), *op.python_key_table.values()] if f.__module__.startswith("lowbit")]
assert not ours(), ours()
result = {first}
assert len(ours()) >= 2, ours()
assert result is None or torch.equal(result, eager)
count = len(ours())
torch.compile(attend, fullgraph=True, backend="eager")(q.repeat(1, 1, 2, 1))
assert len(ours()) == count
"""
    python(code)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("with_sink", [False, True])
def test_compiled_is_eager(backend: str, masked: bool, with_sink: bool) -> None:
    ids = torch.arange(70) // 20
    mask = create_block_mask(lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]), None, None, 70, 70, BLOCK_SIZE=32) if masked else None
    inputs = [*qkv(kv_heads=2), torch.randn(4, 70, 70, requires_grad=True)]
    sink = torch.randn(4, requires_grad=True) if with_sink else None
    wanted = attend(*inputs, ids, mask, sink)
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    found = compiled(*inputs, ids, mask, sink)
    wrt = inputs + ([sink] if with_sink else [])
    tolerance = {"atol": 2e-5, "rtol": 2e-5} if with_sink else {"atol": 1e-6, "rtol": 1e-6}
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, **tolerance)
    grads, wants = (torch.autograd.grad((r[0].sum() + r[1].sin().sum()), wrt) for r in (found, wanted))
    for a, b in zip(grads, wants, strict=True):
        torch.testing.assert_close(a, b, atol=5e-5, rtol=5e-5)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(*inputs, ids, mask, sink)[0], wanted[0], **tolerance)


@pytest.mark.parametrize("dynamic", [False, True])
def test_documents_and_lse_do_not_break_the_graph(dynamic: bool) -> None:
    def packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Any:
        return flex_attention(q, k, v, cu_seqlens=cu_seqlens, enable_gqa=True, return_lse=True)

    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for length, bounds in ((150, [0, 20, 20, 150]), (300, [0, 129, 300]), (300, [0, 1, 2, 3, 300])):
        inputs = [*qkv(length, 2), torch.tensor(bounds)]
        for found, wanted in zip(compiled(*inputs), packed(*inputs), strict=True):
            torch.testing.assert_close(found, wanted, atol=2e-6, rtol=2e-6)
    with pytest.raises(RuntimeError, match="cu_seqlens must ascend from 0 to the length"):
        compiled(*inputs[:3], torch.tensor([0, 30, 20, 300]))


def test_compiled_graph_holds_our_op_and_nothing_of_the_mods() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, example: list[Any]) -> Any:
        from functorch.compile import aot_module_simplified

        def look(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
            seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
            return graph

        return aot_module_simplified(graph, example, fw_compiler=look)

    ids = torch.zeros(70, dtype=torch.int32)
    torch.compile(attend, fullgraph=True, backend=backend)(*qkv(requires_grad=False), torch.randn(4, 70, 70), ids, None)
    assert counter.frame_count == 0 and "lowbit.attention_forward.detached" in seen
    assert not any("flex" in name or "aten.where" in name for name in seen)


def test_new_lengths_and_new_closures_compile_once_more_at_most() -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def step(ids: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, lambda s, b, h, i, j: torch.where(ids[i] == ids[j], s, -torch.inf))

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for length in (40, 70, 64, 129):
        inputs = torch.arange(length) // 13, *qkv(length)
        torch.testing.assert_close(compiled(*inputs), step(*inputs))
    assert counter.frame_count <= 2


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4, 70, 70))
        self.mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 70, 70, BLOCK_SIZE=32)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, lambda s, b, h, i, j: s + self.bias[h, i, j], self.mask)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    inputs, bias = qkv(), torch.randn(4, 70, 70, requires_grad=True)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h, i, j], dropout_p=0.2)

    def gradients(function: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(5)
        for tensor in (*inputs, bias):
            tensor.grad = None
        function(*inputs).square().sum().backward()
        return [tensor.grad for tensor in (*inputs, bias)]

    wanted = gradients(run)
    for a, b in zip(gradients(lambda *tensors: checkpoint(run, *tensors, use_reentrant=reentrant)), wanted, strict=True):
        assert torch.equal(a, b)


def test_an_unknown_op_compiles_too() -> None:
    inputs, bias = qkv(), torch.randn(4, 70, 70, requires_grad=True)

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return flex_attention(q, k, v, lambda s, b, h, i, j: torch.lgamma(s.abs() + 2) + bias[h, i, j])

    compiled = torch.compile(run, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs, bias), run(*inputs, bias), atol=2e-5, rtol=2e-5)


def test_autocast() -> None:
    inputs = qkv(requires_grad=False)
    with torch.autocast("cpu", torch.bfloat16):
        out = flex_attention(*inputs)
    assert out.dtype == torch.bfloat16 and torch.equal(out, flex_attention(*(tensor.bfloat16() for tensor in inputs)))
