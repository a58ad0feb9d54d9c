# SPDX-License-Identifier: Apache-2.0
"""Packed layers with LoRA that read one x, as one autograd Function."""

from __future__ import annotations

import pytest
import torch
from roundings import assert_close
from torch import Tensor, nn

import lowbit
from lowbit.ops.lora_linear import LoraLayer, lora_linear

K = 96


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5)], ids=str)
def test_layers_that_read_one_x(shape: tuple[int, ...]) -> None:
    """Of other formats and sizes, with two adapters, one and none."""
    configs = [lowbit.int4_weight_only(32), lowbit.nf4_weight_only(32), lowbit.int8_weight_only()]
    sizes, counts = (48, 20, 33), (2, 0, 1)
    bases = [
        lowbit.QuantLinear.from_linear(nn.Linear(K, n, bias=n != 20), config.spec(torch.float32))
        for n, config in zip(sizes, configs, strict=True)
    ]
    adapters = [
        [(torch.randn(r, K), torch.randn(n, r), r / 3.0) for r in range(2, 2 + count)]
        for n, count in zip(sizes, counts, strict=True)
    ]
    trained = [factor.requires_grad_() for each in adapters for down, up, _ in each for factor in (down, up)]
    x, grads = torch.randn(*shape, K).requires_grad_(), [torch.randn(*shape, n) for n in sizes]
    layers = [
        LoraLayer(base.weight, None if base.bias is None else base.bias.detach(), base.op_args, base.row_number, each)
        for base, each in zip(bases, adapters, strict=True)
    ]
    found = lora_linear(x, *layers)
    wide = [each.detach().double().requires_grad_() for each in (x, *trained)]
    left, wanted = iter(wide[1:]), []
    for base, each in zip(bases, adapters, strict=True):
        y = nn.functional.linear(
            wide[0], base.dequantize().double(), None if base.bias is None else base.bias.detach().double()
        )
        for _, _, scaling in each:
            y = y + scaling * wide[0] @ next(left).T @ next(left).T
        wanted.append(y)
    if x.numel():
        assert_close([y.detach() for y in found], wanted, K + 4)
    of_ours = torch.autograd.grad(found, [x, *trained], grads)
    of_exact = torch.autograd.grad(wanted, wide, [grad.double() for grad in grads])
    if x.numel():
        assert_close(list(of_ours), list(of_exact), sum(sizes) + 8)
    else:
        assert all(bool((grad == 0).all()) for grad in of_ours)


def layer_of(n: int, ranks: tuple[int, ...]) -> LoraLayer:
    base = lowbit.QuantLinear.from_linear(nn.Linear(K, n), lowbit.int8_weight_only().spec(torch.float32))
    adapters = [(torch.randn(r, K).requires_grad_(), torch.randn(n, r).requires_grad_(), 0.5) for r in ranks]
    return LoraLayer(base.weight, None, base.op_args, base.row_number, adapters)


def factors(layer: LoraLayer) -> list[Tensor]:
    return [factor for down, up, _ in layer.adapters for factor in (down, up)]


def test_a_second_derivative_where_one_layer_has_nothing_to_train() -> None:
    adapted, x = layer_of(48, (4,)), torch.randn(3, K)

    def penalty(y: Tensor) -> list[Tensor]:
        first = torch.autograd.grad(y.square().sum(), factors(adapted), create_graph=True)
        return list(torch.autograd.grad(sum(each.square().sum() for each in first), factors(adapted)))

    down, up, scaling = adapted.adapters[0]
    frozen = lora_linear(x, adapted._replace(adapters=[]))[0].detach()
    wanted = penalty(frozen + scaling * x @ down.T @ up.T)
    for ours, theirs in zip(penalty(lora_linear(x, adapted, layer_of(20, ()))[0]), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


def test_the_backward_may_run_in_autocast() -> None:
    layer, x = layer_of(48, (4,)), torch.randn(3, K).requires_grad_()
    y = lora_linear(x, layer)[0].sum()
    wanted = torch.autograd.grad(y, [x, *factors(layer)], retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(y, [x, *factors(layer)])
    assert all(map(torch.equal, found, wanted))
