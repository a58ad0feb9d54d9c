# SPDX-License-Identifier: Apache-2.0
"""Inside torch.autocast a quantized layer takes and gives the dtypes that nn.Linear takes and gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowbit

DTYPES = [torch.bfloat16, torch.float16]


def pair(config: object, bias: bool = True) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Linear(70, 33, bias=bias)
    quantized = nn.Linear(70, 33, bias=bias)
    quantized.load_state_dict(plain.state_dict())
    lowbit.quantize_(quantized, config)
    return plain, quantized


@pytest.mark.parametrize("config", (lowbit.int8_weight_only(), lowbit.int8_dynamic_activation_int4_weight(), lowbit.float_weight()), ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", [torch.float32, *DTYPES])
@pytest.mark.parametrize("grad", [False, True])
def test_the_result_has_the_dtype_of_nn_linear(dtype, x_dtype, grad, config):
    plain, quantized = pair(config)
    x = torch.randn(5, 70, dtype=x_dtype, requires_grad=grad)
    with torch.autocast("cpu", dtype=dtype):
        wanted, y = plain(x), quantized(x)
        assert torch.equal(y, quantized(x.to(dtype)))
    assert y.dtype == wanted.dtype == dtype
    assert (y.float() - wanted.float()).norm() < 0.25 * wanted.float().norm()
    if grad:
        y.float().sum().backward()
        assert x.grad.dtype == x_dtype and quantized.bias.grad.dtype == torch.float32
        assert x.grad.isfinite().all()


def test_a_trainable_bias_alone_keeps_the_dtype():
    _, quantized = pair(lowbit.int8_weight_only())
    with torch.autocast("cpu"):
        y = quantized(torch.randn(5, 70))
        with torch.no_grad():
            wanted = quantized(torch.randn(5, 70))
    assert y.dtype == wanted.dtype == torch.bfloat16 and y.requires_grad


def test_outside_and_switched_off_nothing_is_cast():
    _, quantized = pair(lowbit.int8_weight_only())
    x = torch.randn(5, 70)
    before = quantized(x)
    with torch.autocast("cpu"):
        assert quantized(x).dtype == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert torch.equal(quantized(x), before)
    assert torch.equal(quantized(x), before)


def test_float64_is_not_cast_and_still_refused():
    _, quantized = pair(lowbit.int8_weight_only())
    with (
        torch.autocast("cpu"),
        pytest.raises(TypeError, match="linear: x must be float32, bfloat16 or float16, got float64"),
    ):
        quantized(torch.randn(5, 70, dtype=torch.float64))


def test_compiled_inside_and_around_autocast():
    _, quantized = pair(lowbit.int8_weight_only())
    x = torch.randn(5, 70)
    with torch.autocast("cpu"):
        wanted = quantized(x)
        assert torch.equal(torch.compile(quantized, backend="aot_eager", fullgraph=True)(x), wanted)

    def inside(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return quantized(x)

    assert torch.equal(torch.compile(inside, backend="aot_eager", fullgraph=True)(x), wanted)


def test_a_fused_gated_mlp_computes_in_autocasts_dtype(gated_mlp):
    lowbit.quantize_(gated_mlp, lowbit.int8_weight_only())
    x = torch.randn(3, 64)
    for grad in (False, True):
        with torch.autocast("cpu"), torch.set_grad_enabled(grad):
            wanted = gated_mlp["mlp"](x)
            lowbit.fuse_gated_mlps(gated_mlp)
            y = gated_mlp["mlp"](x)
        assert y.dtype == wanted.dtype == torch.bfloat16
        torch.testing.assert_close(y, wanted, rtol=0, atol=2e-2 * wanted.abs().max().item())
