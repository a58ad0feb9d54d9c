# SPDX-License-Identifier: Apache-2.0
"""lowbit.compile_blocks: 30 blocks are one graph and one compilation, with caches, masks, adapters and fused pieces."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import metrics

import lowbit
from lowbit import compile_blocks

BLOCKS = 30


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    counters.clear()


class Graphs:
    """A backend that keeps the graphs which it is given."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Attention(nn.Module):
    """Heads with a bias by distance over a causal mask; keys and values in a cache of its own, if it gets one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.mlp = nn.Linear(32, 96), nn.Linear(32, 32), Mlp()
        self.slope = nn.Parameter(torch.rand(2))

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, 16).permute(2, 0, 3, 1, 4)
        if cache is None:
            y = lowbit.flex_attention(q, k, v, lambda s, b, h, i, j: torch.where(i >= j, s - self.slope[h] * (i - j), -torch.inf))
        else:
            cache.append(k, v)
            y = cache.attend(q)
        return self.mlp(x + self.out(y.transpose(1, 2).reshape(x.shape)))


class Stack(nn.Module):
    def __init__(self, kind: type[nn.Module], count: int = BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(count))

    def forward(self, x: Tensor, cache: lowbit.QuantizedKVCache | None = None) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x) if cache is None else block(x, cache.layer(index))
        return x


def quantized(kind: type[nn.Module]) -> Stack:
    torch.manual_seed(0)
    model = Stack(kind).eval()
    lowbit.quantize_(model, lowbit.int8_dynamic_activation_int4_weight(group_size=32))
    return model


def test_thirty_blocks_are_one_compilation_of_inductor() -> None:
    model, x = quantized(Mlp), torch.randn(2, 5, 32)
    with torch.no_grad():
        wanted = model(x)
        names = compile_blocks(model, fullgraph=True)
        metrics.reset()
        with torch._inductor.config.patch(force_disable_caches=True):
            got = model(x)
    assert len(names) == BLOCKS and repr(names) == "blocks.* x 30"
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert 0 < metrics.generated_kernel_count <= 3  # those of one block: gelu, the sum
    torch.testing.assert_close(got, wanted, rtol=0, atol=0.02)  # an int8 activation may round to its neighbour


@pytest.mark.parametrize("kind", [Mlp, Attention])
def test_nothing_of_a_block_is_in_the_graph(kind: type[nn.Module]) -> None:
    model, x, backend = quantized(kind), torch.randn(2, 7, 32), Graphs()
    with torch.no_grad():
        wanted = model(x)
        compile_blocks(model, fullgraph=True, backend=backend)
        torch.testing.assert_close(model(x), wanted)
    assert len(backend.graphs) == 1
    graph = backend.graphs[0]
    bodies = [module for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
    for body in bodies:  # no tensor of a block is held by a graph, and no number of it
        assert not list(body.parameters(recurse=False)) and not list(body.buffers(recurse=False))
        for node in body.graph.nodes:
            numbers = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, int)]
            assert all(abs(number) <= 1024 for number in numbers), node.format_node()  # an address would be larger


def test_our_cache_is_written_by_one_graph_of_all_blocks() -> None:
    model, backend = quantized(Attention), Graphs()
    caches = lowbit.QuantizedKVCache("int8"), lowbit.QuantizedKVCache("int8")
    inputs = [torch.randn(1, length, 32) for length in (9, 1, 1, 1, 1)]
    with torch.no_grad():
        wanted = [model(x, caches[0]) for x in inputs]
        compile_blocks(model, fullgraph=True, backend=backend)
        for x, want in zip(inputs, wanted, strict=True):
            torch.testing.assert_close(model(x, caches[1]), want)
    assert caches[1].length == caches[0].length == 13
    assert len(backend.graphs) <= 4  # an empty cache, a first token, tokens of any length of cache; not one for a layer


@pytest.mark.parametrize("cache", ["dynamic", "static", "quantized", "growing", "fused", "in another order"])
def test_caches_of_transformers_make_no_graph_for_a_layer(cache: str) -> None:
    transformers = pytest.importorskip("transformers")
    import lowbit.models.quantized_cache as ours

    implementation = "lowbit" if cache in ("growing", "fused") else "sdpa"
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=BLOCKS, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation=implementation,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    lowbit.quantize_(model, lowbit.int8_weight_only())
    if cache == "fused":
        lowbit.fuse(model)
    if cache == "in another order":  # a block's place in the model is not its place in the cache
        for place, layer in enumerate(model.model.layers):
            layer.self_attn.layer_idx = BLOCKS - 1 - place
    made = {
        "static": lambda: transformers.StaticCache(config=config, max_cache_len=32),
        "quantized": lambda: ours.QuantizedCache("int8"),
    }.get(cache, transformers.DynamicCache)
    caches, backend = (made(), made()), Graphs()
    inputs = [torch.randint(0, 97, (1, length)) for length in (9, 1, 1, 1)]
    with torch.no_grad():
        wanted = [model(x, past_key_values=caches[0]).logits for x in inputs]
        compile_blocks(model, fullgraph=True, backend=backend)
        for x, want in zip(inputs, wanted, strict=True):
            torch.testing.assert_close(model(x, past_key_values=caches[1]).logits, want, rtol=1e-4, atol=1e-5)
    assert caches[1].get_seq_length() == 12 and len(caches[1].layers) == BLOCKS
    if cache == "in another order":
        for mine, theirs in zip(caches[1].layers, caches[0].layers, strict=True):
            torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-4, atol=1e-5)
    assert 0 < len(backend.graphs) <= 3


def test_adapters_train_by_one_graph() -> None:
    peft = pytest.importorskip("peft")
    model, x = quantized(Mlp), torch.randn(2, 5, 32, requires_grad=True)  # as the result of a block does
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False))
    backend = Graphs()

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(x).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.requires_grad]

    wanted = gradients()
    assert len(compile_blocks(model, fullgraph=True, backend=backend)) == BLOCKS
    for got, want in zip(gradients(), wanted, strict=True):  # up to 2e6: 30 blocks add to x
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * want.abs().max().item())
    assert len(backend.graphs) == 1


def test_hooks_of_blocks_are_called() -> None:
    model, seen = quantized(Mlp), []
    compile_blocks(model, backend="eager")
    model.blocks[3].register_forward_hook(lambda module, args, y: seen.append(y.shape))
    with torch.no_grad():
        model(torch.randn(2, 32))
    assert seen == [(2, 32)]


def test_only_blocks_of_one_structure_are_taken() -> None:
    model = Stack(Mlp, 4)
    model.blocks[2].up = nn.Linear(32, 64, bias=False)
    assert compile_blocks(model, backend="eager") == ["blocks.0", "blocks.1", "blocks.3"]
    assert model.blocks[2]._compiled_call_impl is None
    outer = nn.Sequential(*(Stack(Mlp, 2) for _ in range(2)))
    assert compile_blocks(outer, backend="eager") == ["0", "1"]
    assert isinstance(copy.deepcopy(outer)[0], Stack)


def test_what_has_no_blocks_is_refused() -> None:
    with pytest.raises(TypeError, match="compile_blocks: model must be a torch.nn.Module, got function"):
        compile_blocks(lambda x: x)
    with pytest.raises(ValueError, match="compile_blocks: model must have two blocks of one class and structure .* got Mlp without"):
        compile_blocks(Mlp())
