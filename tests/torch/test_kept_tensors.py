# SPDX-License-Identifier: Apache-2.0
"""No call keeps its tensors: after 200 calls of each path, those that fail among them, as many live as before, and the
process holds as much memory."""

from __future__ import annotations

import copy
import ctypes
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit.score import program_cache

CALLS = 200
_MIB = 1 << 20


def qkv(**options: Any) -> list[Tensor]:
    """Queries of 2 KiB; keys and values of 128 KiB."""
    return [torch.randn(1, 1, length, 64, **options) for length in (8, 512, 512)]


def bias() -> Tensor:
    return torch.randn(8, 512)


def unknown_op_in_score_mod() -> Any:
    return lowbit.flex_attention(*qkv(), lambda s, b, h, i, j: torch.special.bessel_j0(s))


def unknown_op_in_score_mod_that_captures() -> Any:
    table = bias()
    return lowbit.flex_attention(*qkv(), lambda s, b, h, i, j: torch.special.bessel_j0(s) + table[i, j])


def gradient_through_torch() -> None:
    out = lowbit.flex_attention(*qkv(requires_grad=True), lambda s, b, h, i, j: torch.special.bessel_j0(s))
    out.sum().backward()


def unknown_op_in_mask_mod() -> Any:
    table = bias()
    made = lowbit.create_block_mask(lambda b, h, i, j: torch.special.bessel_j0(table[i, j]) > 0, None, None, 8, 512)
    return lowbit.flex_attention(*qkv(), None, made)


def unknown_op_explained() -> Any:
    table = bias()
    return lowbit.explain(lambda s, b, h, i, j: torch.special.bessel_j0(s) + table[i, j])


def score_mod_that_captures() -> Any:
    table = bias()
    return lowbit.flex_attention(*qkv(), lambda s, b, h, i, j: s + table[i, j])


def score_mod_that_makes_a_tensor() -> Any:
    table = bias()
    return lowbit.flex_attention(*qkv(), lambda s, b, h, i, j: s + (table * 2)[i, j])


def gradient_of_a_captured_tensor() -> None:
    table = bias().requires_grad_()
    lowbit.flex_attention(*qkv(requires_grad=True), lambda s, b, h, i, j: s + table[i, j]).sum().backward()


def mask_mod_that_captures() -> Any:
    table = bias() > 0
    return lowbit.flex_attention(
        *qkv(), None, lowbit.create_block_mask(lambda b, h, i, j: table[i, j], None, None, 8, 512)
    )


def score_mod_that_raises() -> None:
    table = bias()
    with pytest.raises(RuntimeError, match="data-dependent"):
        lowbit.flex_attention(*qkv(), lambda s, b, h, i, j: s if s > 0 else table[i, j])


def attention() -> Any:
    return lowbit.scaled_dot_product_attention(*qkv(), bias())


def gradient_of_attention() -> None:
    lowbit.scaled_dot_product_attention(*qkv(requires_grad=True)).sum().backward()


def attention_of_another_length() -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match="value must have shape"):
        lowbit.scaled_dot_product_attention(q, k, v[:, :, 1:])


def layer() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 32))
    lowbit.quantize_(model, lowbit.int8_dynamic_activation_int4_weight())
    return model[0]


LAYER = layer()


def linear() -> Any:
    return LAYER(torch.randn(512, 64))


def gradient_of_linear() -> None:
    LAYER(torch.randn(512, 64, requires_grad=True)).sum().backward()
    LAYER.bias.grad = None


def linear_of_another_width() -> None:
    with pytest.raises(RuntimeError, match="last dimension"):
        LAYER(torch.randn(512, 65))


def linear_of_a_dtype_without_kernels() -> None:
    with pytest.raises(TypeError, match="float32, bfloat16 or float16"):
        LAYER(torch.randn(512, 64, dtype=torch.float64))


def layers_made_and_dropped() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Embedding(256, 256))
    lowbit.quantize_(model, lowbit.int8_weight_only(), filter_fn=lambda module, name: not list(module.children()))
    other = copy.deepcopy(model)
    other.load_state_dict(model.state_dict())
    other[1](torch.arange(9))
    lowbit.dequantize_(other)


def optimizer_with_new_parameters() -> None:
    parameter = nn.Parameter(torch.randn(256, 256))
    optimizer = lowbit.optim.AdamW8bit([parameter])
    for _ in range(2):
        parameter.grad = torch.randn(256, 256)
        optimizer.step()


PARAMETER = nn.Parameter(torch.randn(256, 256))
OPTIMIZER = lowbit.optim.AdamW8bit([PARAMETER])


def optimizer_with_new_gradients() -> None:
    PARAMETER.grad = torch.randn(256, 256)
    OPTIMIZER.step()
    PARAMETER.grad = None


def cache() -> Any:
    made, (q, k, v) = lowbit.QuantizedKVCache("int8"), qkv()
    made.append(0, k, v)
    made.append(0, q, q)
    made.crop(256)
    return made.attend(0, q)


def per_sample() -> Any:
    return torch.func.vmap(torch.func.grad(lambda x: LAYER(x).sum()))(torch.randn(512, 64))


PATHS = [
    unknown_op_in_score_mod, unknown_op_in_score_mod_that_captures, gradient_through_torch, unknown_op_in_mask_mod,
    unknown_op_explained, score_mod_that_captures, score_mod_that_makes_a_tensor, gradient_of_a_captured_tensor,
    mask_mod_that_captures, score_mod_that_raises, attention, gradient_of_attention, attention_of_another_length, linear,
    gradient_of_linear, linear_of_another_width, linear_of_a_dtype_without_kernels, layers_made_and_dropped,
    optimizer_with_new_parameters, optimizer_with_new_gradients, cache, per_sample,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*runs through torch")
@pytest.mark.parametrize("call", PATHS, ids=lambda call: call.__name__)
def test_no_call_keeps_its_tensors(call: Callable[[], Any]) -> None:
    for _ in range(10):
        call()
    tensors, bytes_held = _tensors(), _resident()
    for _ in range(CALLS):
        call()
    assert _tensors() <= tensors  # fewer where those of an earlier test went in between
    grown = (_resident() - bytes_held) / _MIB
    assert grown < CALLS / 16, f"{grown:.0f} MiB more"  # half of what one tensor of each call would be, 128 KiB


@pytest.mark.filterwarnings("ignore:.*runs through torch")
def test_the_first_call_of_a_mod_without_a_program_is_let_go() -> None:
    """The reason is kept from then on; nothing that the call had in its hands is."""
    table, traces = bias(), program_cache.traces

    def run(table: Tensor) -> list[weakref.ref[Tensor]]:
        q, k, v = qkv()
        lowbit.flex_attention(q, k, v, lambda s, b, h, i, j: torch.special.bessel_y1(s) + table[i, j])
        return [weakref.ref(tensor) for tensor in (q, k, v)]

    held = run(table) + run(table)
    assert program_cache.traces == traces + 1
    gc.collect()
    assert [reference() for reference in held] == [None] * 6


def _tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def _resident() -> int:
    ctypes.CDLL(None).malloc_trim(0)  # what is free but not given back depends on when Python collected its cycles
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
