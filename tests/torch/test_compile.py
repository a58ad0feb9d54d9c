# SPDX-License-Identifier: Apache-2.0
"""torch.compile without graph breaks, with dynamic shapes, without a graph per block; torch.export into a fresh process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lowbit import _C, testing
from lowbit.ops.linear import linear
from lowbit.testing import LinearCase, assert_within, cached_data, make_data

CASE = LinearCase(6, 20, 70, "float32", "int4", 32, "symmetric", "int8_group", "float32", "silu", True, True)


class Block(nn.Module):
    """One packed linear layer with fused silu, plain Parameters only: what a QuantLinear is to the compiler."""

    def __init__(self, n: int = 32, k: int = 32, x_format: str = "int8_group") -> None:
        super().__init__()
        self.op_args = LinearCase(1, n, k, format="int4", group_size=32, x_format=x_format).op_args
        self.weight = nn.Parameter(testing.pack_weight(torch.randn(n, k), "int4", 32), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(n))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.op_args, self.bias, 4) + x


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_without_graph_breaks_equals_eager(backend: str) -> None:
    data = cached_data(CASE)

    def function(x: Tensor, mul: Tensor, add: Tensor) -> Tensor:
        return linear(x * 2, data.packed, CASE.op_args, data.bias, 4, mul, add) + 1

    wanted = function(data.x, data.mul, data.add)
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(data.x, data.mul, data.add), wanted)


def test_compiled_training_step_equals_eager() -> None:
    block = Block()
    x = torch.randn(4, 32, requires_grad=True)
    block(x).square().sum().backward()
    wanted, wanted_bias = x.grad, block.bias.grad
    x.grad = block.bias.grad = None
    torch.compile(block, fullgraph=True, backend="aot_eager")(x).square().sum().backward()
    torch.testing.assert_close(x.grad, wanted)
    torch.testing.assert_close(block.bias.grad, wanted_bias)


def test_dynamic_batch_compiles_once() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    block = Block().requires_grad_(False)
    compiled = torch.compile(block, fullgraph=True, backend=counter, dynamic=True)
    for m in (3, 5, 17, 64):
        x = torch.randn(m, 32)
        torch.testing.assert_close(compiled(x), block(x))
    assert counter.frame_count == 1


def test_many_equal_blocks_are_one_graph() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    blocks = [Block().requires_grad_(False) for _ in range(12)]
    x = torch.randn(4, 32)
    for block in blocks:
        wanted = block(x)
        block.compile(fullgraph=True, backend=counter)
        torch.testing.assert_close(block(x), wanted)
    assert counter.frame_count == 1


def test_exported_program_loads_after_a_bare_import_torch(tmp_path: Path, python: Callable[..., str], installed: str) -> None:
    block = Block().requires_grad_(False)
    x = torch.randn(4, 32)
    program = torch.export.export(block, (x,), dynamic_shapes=({0: torch.export.Dim("m", min=2)},))
    torch.testing.assert_close(program.module()(x), block(x))
    assert "lowbit.linear" in program.graph_module.code
    torch.export.save(program, tmp_path / "block.pt2")
    torch.save((x, block(x)), tmp_path / "data.pt")
    code = """
import sys, torch
program = torch.export.load(sys.argv[1] + "/block.pt2")
x, wanted = torch.load(sys.argv[1] + "/data.pt")
torch.testing.assert_close(program.module()(x), wanted)
torch.testing.assert_close(program.module()(x[:3]), wanted[:3])
print("ok")
"""
    assert "ok" in python(code, str(tmp_path), PYTHONPATH=installed)


def test_functionalized_trace_holds_one_op() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    data = cached_data(CASE)
    graph = make_fx(lambda x, weight: linear(x, weight, CASE.op_args), tracing_mode="symbolic")(data.x, data.packed)
    assert sum(node.target is torch.ops.lowbit.linear.detached for node in graph.graph.nodes) == 1


def test_bfloat16_compiled_result_is_within_budget() -> None:
    case = LinearCase(9, 33, 100, "bfloat16", "int8", 0, "symmetric", "float", "float32", "gelu")
    data = make_data(case)
    function = torch.compile(
        lambda x: linear(x, data.packed, case.op_args, data.bias, _C.ACTIVATIONS["gelu"]), fullgraph=True, backend="aot_eager"
    )
    assert_within(function(data.x), data.wanted, data.allowed, str(case))
