# SPDX-License-Identifier: Apache-2.0
"""torch.export, strict and not, of what a model may hold: one program for every batch and length, equal to eager mode."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import lowbit
from lowbit import testing
from lowbit.attention import masks
from lowbit.ops.linear import linear as linear_of_numbers

CONFIGS = {
    "int8": lowbit.int8_weight_only(),
    "int8 group": lowbit.intx_weight_only(torch.int8, 32),
    "int4": lowbit.int4_weight_only(group_size=32),
    "int3": lowbit.intx_weight_only(torch.int3, 32),
    "nf4": lowbit.nf4_weight_only(),
    "fp4": lowbit.fp4_weight_only(),
    "fp8": lowbit.float8_weight_only(),
    "bfloat16": lowbit.float_weight(torch.bfloat16),
    "a8w8": lowbit.int8_dynamic_activation_int8_weight(),
    "a8w4": lowbit.int8_dynamic_activation_int4_weight(group_size=32),
    "fp8 both": lowbit.float8_dynamic_activation_float8_weight(),
    "sparse": lowbit.semi_sparse_weight(),
    "qat": lowbit.training.QATConfig(lowbit.int4_weight_only(group_size=32), step="prepare"),
}
BATCH_AND_LENGTH = {0: Dim("batch", min=1, max=64), 1: Dim("length", min=1, max=64)}
OF_HEADS = {0: Dim("batch", min=1, max=64), 2: Dim("length", min=1, max=64)}


class Calls(nn.Module):
    """A function or a module, called with all tensors."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors)


def check(
    function: Callable[..., Any], made: Callable[[int, int], tuple[Tensor, ...]], dynamic: Any, strict: bool, *ops: str
) -> None:
    """Export with one size, save, load, and compare with eager mode at others, 1 among them."""
    model, tensors = Calls(function).eval(), made(2, 6)
    with torch.no_grad():
        program = torch.export.export(model, tensors, dynamic_shapes=((dynamic,) * len(tensors),), strict=strict)
        targets = {str(node.target).removesuffix(".default") for node in program.graph.nodes}
        assert {f"lowbit.{op}" for op in ops} <= targets, targets
        buffer = io.BytesIO()
        torch.export.save(program, buffer)
        buffer.seek(0)
        run = torch.export.load(buffer).module()
        for batch, length in ((2, 6), (5, 3), (1, 1), (3, 40)):
            tensors = made(batch, length)
            torch.testing.assert_close(run(*tensors), model(*tensors), atol=1e-5, rtol=1e-5)
    tensors = made(5, 3)
    wanted = gradients(model, tensors)
    for kept in (run, program.run_decompositions().module()):
        torch.testing.assert_close(gradients(kept, tensors), wanted, atol=1e-5, rtol=1e-5)


def gradients(run: nn.Module, tensors: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Those of inputs and parameters, by name; none over a cache, which detaches in eager mode and refuses in a program."""
    inputs = {str(i): tensor.clone().requires_grad_(tensor.is_floating_point()) for i, tensor in enumerate(tensors)}
    leaves = {name: leaf for name, leaf in (inputs | dict(run.named_parameters())).items() if leaf.requires_grad}
    try:
        loss = run(*inputs.values()).square().sum()
    except NotImplementedError:
        return {}
    if not loss.requires_grad:
        return {}
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


@pytest.fixture(params=[False, True], ids=["not-strict", "strict"])
def strict(request: pytest.FixtureRequest) -> bool:
    torch._dynamo.reset()
    return request.param


@pytest.mark.parametrize("name", CONFIGS)
def test_linear_layers(name: str, strict: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32, bias=False))
    lowbit.quantize_(model, CONFIGS[name])
    op = "fake_quantize" if name == "qat" else "linear"
    check(model, lambda batch, length: (torch.randn(batch, length, 64),), BATCH_AND_LENGTH, strict, op)


def test_the_op_itself(strict: bool) -> None:
    packed, numbers = testing.pack_weight(torch.randn(20, 70), "int8"), (20, 70, lowbit._C.FORMATS["int8"], 0, False, 0)

    def made(batch: int, length: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(batch, length, columns) for columns in (70, 20, 20))

    check(
        lambda x, mul, add: linear_of_numbers(x, packed, numbers, None, 4, mul, add),
        made,
        BATCH_AND_LENGTH,
        strict,
        "linear",
    )


def test_embeddings_and_a_tied_head(strict: bool) -> None:
    model = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 50, bias=False))
    model[1].weight = model[0].weight
    lowbit.quantize_(
        model, lowbit.int8_weight_only(), lambda module, name: isinstance(module, (nn.Embedding, nn.Linear))
    )
    check(model, tokens, BATCH_AND_LENGTH, strict, "embedding", "linear")


def tokens(batch: int, length: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, 50, (batch, length)),)


def qkv(batch: int, length: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(batch, heads, length, 32) for heads in (4, 2, 2))


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        score_mod = lambda score, b, h, i, j: score + self.bias[h] * (j - i)  # noqa: E731
        return lowbit.flex_attention(q, k, v, score_mod, enable_gqa=True)


def over_a_cache(format: str) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache = lowbit.QuantizedKVCache(format)
        cache.append(0, k, v)
        cache.append(0, k * 2, v)
        return cache.attend(0, q, window=5)

    return run


def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    blocks = lowbit.create_block_mask(masks.sliding_window(3), None, None, q.shape[2], k.shape[2])
    return lowbit.flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)


def with_a_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    return lowbit.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return lowbit.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize(
    "attend", [causal, with_a_mask, Biased(), windowed], ids=["causal", "mask", "score_mod", "mask_mod"]
)
def test_attention(attend: Callable[..., Tensor], strict: bool) -> None:
    check(attend, qkv, OF_HEADS, strict, "attention_forward")


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_attention_over_a_quantized_cache(format: str, strict: bool) -> None:
    check(over_a_cache(format), qkv, OF_HEADS, strict, "kv_quantize_", "decode")


class Logits(nn.Module):
    """A language model whose result is a tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).logits


def test_a_fused_model(strict: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="lowbit").eval()
    lowbit.quantize_(model, lowbit.int8_weight_only())
    assert len(lowbit.fuse(model))
    check(Logits(model), tokens, BATCH_AND_LENGTH, strict, "linear", "attention_forward")
