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


def flex(mod: Any, mask_mod: Any = None, **options: Any) -> Tensor:
    mask = mask_mod and lowbit.create_block_mask(mask_mod, None, None, 8, 512)
    return lowbit.flex_attention(*qkv(**options), mod, mask)


def refused(error: type[Exception], text: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=text):
        call()


def layer() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 32))
    lowbit.quantize_(model, lowbit.int8_dynamic_activation_int4_weight())
    return model[0]


LAYER = layer()
PARAMETER = nn.Parameter(torch.randn(256, 256))
OPTIMIZER = lowbit.optim.AdamW8bit([PARAMETER])


def gradient_of_linear() -> None:
    LAYER(torch.randn(512, 64, requires_grad=True)).sum().backward()
    LAYER.bias.grad = None


def attention_of_another_length() -> None:
    q, k, v = qkv()
    refused(ValueError, "value must have shape", lambda: lowbit.scaled_dot_product_attention(q, k, v[:, :, 1:]))


def layers_made_and_dropped() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Embedding(256, 256))
    lowbit.quantize_(model, lowbit.int8_weight_only(), filter_fn=lambda module, name: not list(module.children()))
    other = copy.deepcopy(model)
    other.load_state_dict(model.state_dict())
    other[1](torch.arange(9))
    lowbit.dequantize_(other)


def steps(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        parameter.grad = torch.randn(256, 256)
        optimizer.step()
    parameter.grad = None


def optimizer_with_new_parameters() -> None:
    parameter = nn.Parameter(torch.randn(256, 256))
    steps(parameter, lowbit.optim.AdamW8bit([parameter]))


def cache() -> Any:
    made, (q, k, v) = lowbit.QuantizedKVCache("int8"), qkv()
    made.append(0, k, v)
    made.append(0, q, q)
    made.crop(256)
    return made.attend(0, q)


OF_A_BIAS: dict[str, Callable[[Tensor], Any]] = {
    "unknown op in a score_mod that captures": lambda bias: flex(lambda s, b, h, i, j: torch.special.bessel_j0(s) + bias[i, j]),
    "unknown op in a mask_mod": lambda bias: flex(None, lambda b, h, i, j: torch.special.bessel_j0(bias[i, j]) > 0),
    "unknown op explained": lambda bias: lowbit.explain(lambda s, b, h, i, j: torch.special.bessel_j0(s) + bias[i, j]),
    "score_mod that captures": lambda bias: flex(lambda s, b, h, i, j: s + bias[i, j]),
    "score_mod that makes a tensor": lambda bias: flex(lambda s, b, h, i, j: s + (bias * 2)[i, j]),
    "gradient of a captured tensor": lambda bias: flex(lambda s, b, h, i, j: s + bias.requires_grad_()[i, j], requires_grad=True).sum().backward(),
    "mask_mod that captures": lambda bias: flex(None, lambda b, h, i, j: bias[i, j] > 0),
    "score_mod that raises": lambda bias: refused(RuntimeError, "data-dependent", lambda: flex(lambda s, b, h, i, j: s if s > 0 else bias[i, j])),
    "attention": lambda bias: lowbit.scaled_dot_product_attention(*qkv(), bias),
}  # fmt: skip
PATHS: dict[str, Callable[[], Any]] = {
    **{name: lambda call=call: call(bias()) for name, call in OF_A_BIAS.items()},
    "unknown op in a score_mod": lambda: flex(lambda s, b, h, i, j: torch.special.bessel_j0(s)),
    "gradient through torch": lambda: flex(lambda s, b, h, i, j: torch.special.bessel_j0(s), requires_grad=True).sum().backward(),
    "gradient of attention": lambda: lowbit.scaled_dot_product_attention(*qkv(requires_grad=True)).sum().backward(),
    "attention of another length": attention_of_another_length,
    "linear": lambda: LAYER(torch.randn(512, 64)),
    "gradient of linear": gradient_of_linear,
    "linear of another width": lambda: refused(RuntimeError, "last dimension", lambda: LAYER(torch.randn(512, 65))),
    "linear of a dtype without kernels": lambda: refused(TypeError, "float32, bfloat16 or float16", lambda: LAYER(torch.randn(512, 64).double())),
    "layers made and dropped": layers_made_and_dropped,
    "optimizer with new parameters": optimizer_with_new_parameters,
    "optimizer with new gradients": lambda: steps(PARAMETER, OPTIMIZER),
    "cache": cache,
    "per sample": lambda: torch.func.vmap(torch.func.grad(lambda x: LAYER(x).sum()))(torch.randn(512, 64)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*runs through torch")
@pytest.mark.parametrize("call", PATHS.values(), ids=PATHS)
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
