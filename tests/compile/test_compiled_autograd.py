# SPDX-License-Identifier: Apache-2.0
"""Compiled Autograd: a backward is one graph without breaks that calls our ops, and gradients are those of eager mode.

Two cases are compared with nn.Linear in the place of ours, because torch 2.13 breaks their graphs for its own layers too:
checkpointing where the forward is not compiled, and FSDP2, whose hooks are kept out of Dynamo."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch._dynamo.compiled_autograd import _enable
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import lowbit

Case = tuple[Callable[[int], Tensor], list[Tensor]]
"""The loss for a number of rows or queries, and the tensors that it has gradients for."""
RANKS = 2


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    counters.clear()


def model(config: Any = None) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 32))
    if config is not None:
        lowbit.quantize_(made, config)
    return made


def trained(module: nn.Module) -> list[Tensor]:
    return [p for p in module.parameters() if p.requires_grad]


def rows(count: int) -> Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(1))


def layers() -> Case:
    made, x = model(lowbit.int8_dynamic_activation_int4_weight(group_size=32)), rows(8).requires_grad_()
    return lambda count: made(x[:count]).square().sum(), [x, *trained(made)]


def adapted() -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=False)
    return peft.get_peft_model(model(lowbit.nf4_weight_only()), config)


def lora() -> Case:
    made, x = adapted(), rows(8)
    return lambda count: made(x[:count]).square().sum(), trained(made)


def checkpointed_lora() -> Case:
    made, x = adapted(), rows(8)
    return lambda count: checkpoint(made, x[:count], use_reentrant=False).square().sum(), trained(made)


def hooks() -> Case:
    """Hooks on an input, on a result, and on a gradient that is complete."""
    made, x = model(lowbit.int8_weight_only()), rows(8).requires_grad_()
    x.register_hook(lambda grad: grad * 3)

    def double(bias: Tensor) -> None:
        bias.grad.mul_(2)

    made[2].bias.register_post_accumulate_grad_hook(double)

    def loss(count: int) -> Tensor:
        y = made(x[:count])
        y.register_hook(lambda grad: grad.clamp(-1, 1))
        return y.square().sum()

    return loss, [x, *trained(made)]


def qkv() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, heads, 40, 16, requires_grad=True) for heads in (4, 2, 2)]


def sdpa() -> Case:
    (q, k, v), mask = qkv(), torch.randn(40, 40, requires_grad=True)

    def loss(count: int) -> Tensor:
        out = lowbit.scaled_dot_product_attention(q[:, :, :count], k, v, mask[:count], enable_gqa=True)
        return out.square().sum()

    return loss, [q, k, v, mask]


def dropout() -> Case:
    q, k, v = qkv()

    def loss(count: int) -> Tensor:
        args = dict(dropout_p=0.3, is_causal=True, enable_gqa=True)
        return lowbit.scaled_dot_product_attention(q[:, :, :count], k, v, **args).square().sum()

    return loss, [q, k, v]


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return lowbit.flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h, i, j], enable_gqa=True)


def flex() -> Case:
    (q, k, v), bias = qkv(), torch.randn(4, 40, 40, requires_grad=True)
    return lambda count: attend(q[:, :, :count], k, v, bias).square().sum(), [q, k, v, bias]


def checkpointed_flex() -> Case:
    (q, k, v), bias = qkv(), torch.randn(4, 40, 40, requires_grad=True)
    return lambda count: checkpoint(
        attend, q[:, :, :count], k, v, bias, use_reentrant=False
    ).square().sum(), [q, k, v, bias]  # fmt: skip


DEQUANTIZE, ATTENTION = "lowbit.dequantize", "lowbit.attention_backward"
CASES: dict[str, tuple[Callable[[], Case], dict[str, int]]] = {
    "layers": (layers, {DEQUANTIZE: 2}),
    "lora": (lora, {DEQUANTIZE: 1}),  # the input of the first layer needs no gradient
    "checkpointed_lora": (checkpointed_lora, {DEQUANTIZE: 1, "lowbit.linear": 2}),
    "hooks": (hooks, {DEQUANTIZE: 2}),
    "sdpa": (sdpa, {ATTENTION: 1}),
    "dropout": (dropout, {ATTENTION: 1}),
    "flex": (flex, {ATTENTION: 1}),
    "checkpointed_flex": (checkpointed_flex, {ATTENTION: 1, "lowbit.attention_forward": 1}),
}


def gradients(loss: Callable[[], Tensor], leaves: list[Tensor], compiler: Any = None) -> list[Tensor]:
    torch.manual_seed(1)  # of dropout
    if compiler is None:
        loss().backward()
    else:
        with _enable(compiler):
            loss().backward()
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return found


def ops(graph: torch.fx.GraphModule) -> Counter[str]:
    """Calls of our ops, by either of their entries."""
    names = (str(node.target) for node in graph.graph.nodes)
    return Counter(name.rpartition(".")[0] for name in names if name.startswith("lowbit."))


def filled(counter: CompileCounterWithBackend) -> list[torch.fx.GraphModule]:
    """Graphs with a call; Compiled Autograd has an empty one too behind the dropout layers of peft, over nn.Linear too."""
    return [graph for graph in counter.graphs if any(node.op == "call_function" for node in graph.graph.nodes)]


@pytest.mark.parametrize(
    ("name", "forward", "backend"),
    [
        *((name, "compiled", "aot_eager") for name in CASES),
        *((name, "eager", "aot_eager") for name in CASES if not name.startswith("checkpointed")),
        ("layers", "eager", "inductor"),
        ("checkpointed_flex", "compiled", "inductor"),
    ],
)
def test_a_backward_is_one_graph_that_calls_our_ops(name: str, forward: str, backend: str) -> None:
    make, wanted_ops = CASES[name]
    loss, leaves = make()
    counter = CompileCounterWithBackend(backend)
    compiler = torch.compile(backend=counter, fullgraph=True)
    of_rows = torch.compile(loss, backend="aot_eager", fullgraph=True) if forward == "compiled" else loss
    for count in (8, 8, 5):
        wanted = gradients(lambda: loss(count), leaves)  # noqa: B023
        found = gradients(lambda: of_rows(count), leaves, compiler)  # noqa: B023
        for leaf, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(leaf, want, rtol=1e-5, atol=1e-5)
    graphs = filled(counter)
    assert 1 <= len(graphs) <= 2, "another number of rows makes one more graph at the most"
    assert not counters["graph_break"]
    for graph in graphs:
        assert dict(ops(graph)) == wanted_ops


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_of_an_eager_forward_breaks_no_more_than_over_torchs_layers(reentrant: bool) -> None:
    breaks = []
    for config in (None, lowbit.int8_weight_only()):
        torch._dynamo.reset()
        counters.clear()
        made, x = model(config), rows(8).requires_grad_()
        leaves = [x, made[0].bias, made[2].bias]
        wanted = gradients(lambda: made(x).square().sum(), leaves)  # noqa: B023
        run = lambda: checkpoint(made, x, use_reentrant=reentrant).square().sum()  # noqa: B023, E731
        for leaf, want in zip(gradients(run, leaves, torch.compile(backend="aot_eager")), wanted, strict=True):
            torch.testing.assert_close(leaf, want)
        breaks.append(sum(counters["graph_break"].values()))
    assert breaks[0] >= breaks[1] > 0, f"{breaks}; no break: torch has learned it, and the other test can have the case"


def spawn(run: Callable[..., None]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(run, args=(port,), nprocs=RANKS, join=True)


def sharded_steps(rank: int, port: int) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (RANKS,))

        def sharded(config: Any) -> nn.Sequential:
            made = model(config)
            for part in (made[2], made):
                fully_shard(part, mesh=mesh)
            return made

        def step(made: nn.Module, compiler: Any = None) -> list[Tensor]:
            x = rows(8).requires_grad_()
            found = gradients(lambda: made(x).square().sum(), [x, made[0].bias, made[2].bias], compiler)
            return [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in found]

        def same(found: list[Tensor], wanted: list[Tensor]) -> None:
            for grad, want in zip(found, wanted, strict=True):
                torch.testing.assert_close(grad, want)

        breaks = []
        for config in (None, lowbit.int8_weight_only()):
            torch._dynamo.reset()
            counters.clear()
            made = sharded(config)
            same(step(made, torch.compile(backend="aot_eager")), step(model(config)))
            breaks.append(sum(counters["graph_break"].values()))
        assert breaks[0] >= breaks[1] > 0, breaks  # none: torch has learned it

        # Each sharded part as graphs of its own is the way that torch has: one forward and one backward for each.
        torch._dynamo.reset()
        config, backwards = lowbit.int8_weight_only(), []
        whole, made = model(config), sharded(config)

        def backward(graph: torch.fx.GraphModule, _: Any) -> Any:
            backwards.append(dict(ops(graph)))
            return graph

        backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=lambda graph, _: graph, bw_compiler=backward)
        for part in (made[0], made[2]):
            part.compile(backend=backend, fullgraph=True)
        for _ in range(3):
            same(step(made), step(whole))
        assert backwards == [{DEQUANTIZE: 1}] * 2, backwards
        dist.barrier()
    finally:
        dist.destroy_process_group()
    os._exit(0)  # past torch's own threads, which abort 1 of 10 ranks at exit, without lowbit too


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
@pytest.mark.skipif(
    torch.__version__ < (2, 13),
    reason="this torch's FSDP2 wants a gradient of every parameter, which no integer can have",
)
def test_fsdp2_breaks_no_more_than_over_torchs_layers_and_compiled_parts_have_one_backward_each() -> None:
    spawn(sharded_steps)
