# SPDX-License-Identifier: Apache-2.0
"""FlopCounterMode counts our ops as it counts torch's."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import lowbit


def counted(run) -> int:  # noqa: ANN001
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def test_linear_layers_count_as_float_ones() -> None:
    float_model, x = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)), torch.randn(3, 5, 64)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))
    lowbit.quantize_(model, lowbit.int8_weight_only())
    with torch.no_grad():
        assert counted(lambda: model(x)) == counted(lambda: float_model(x)) == 2 * 15 * (64 * 96 + 96 * 32)


def test_blocks_that_are_there_count() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    lowbit.sparsify_(model, lowbit.block_sparse_weight(16, sparsity=0.75))
    with torch.no_grad():
        assert counted(lambda: model(torch.randn(5, 64))) == 2 * 5 * 64 * 64 // 4


def test_each_row_counts_one_of_many_weights() -> None:
    layers = nn.ModuleList(nn.Linear(64, 96) for _ in range(3))
    lowbit.quantize_(layers, lowbit.int8_weight_only())
    weight, index = torch.stack([layer.weight for layer in layers]), torch.tensor([[0, 2], [1, 1]])
    run = lambda: lowbit.gather_linear(torch.randn(2, 64), weight, index, layers[0].stored)  # noqa: E731
    assert counted(run) == 2 * 4 * 64 * 96


def test_each_pair_counts_both_products_of_an_expert() -> None:
    layers = nn.ModuleList([nn.Linear(64, 96), nn.Linear(48, 32)])
    lowbit.quantize_(layers, lowbit.int8_weight_only())
    gate_up, down = (layer.weight.expand(3, -1, -1) for layer in layers)
    index, args = torch.tensor([[0, 2], [1, 1]]), [layer.stored for layer in layers]
    run = lambda: lowbit.experts(torch.randn(2, 64), gate_up, down, index, torch.rand(2, 2), *args)  # noqa: E731
    assert counted(run) == 2 * 4 * (64 * 96 + 48 * 32)


def test_a_loss_counts_its_products_with_the_head() -> None:
    x, head = torch.randn(6, 64, requires_grad=True), torch.randn(96, 64)
    labels, products = torch.randint(0, 96, (6,)), 2 * 6 * 64 * 96
    assert counted(lambda: lowbit.linear_cross_entropy(x, head, labels).backward()) == 2 * products
    assert counted(lambda: lowbit.linear_cross_entropy(x, head.requires_grad_(), labels)) == 4 * products
    assert counted(lambda: lowbit.linear_cross_entropy(x.detach(), head.detach(), labels)) == products


def test_attention_counts_as_torchs_forward_and_backward() -> None:
    q, k, v = (torch.randn(2, heads, length, 32, requires_grad=True) for heads, length in ((4, 7), (2, 9), (2, 9)))
    theirs = counted(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    assert counted(lambda: lowbit.scaled_dot_product_attention(q, k, v, enable_gqa=True)) > 0
    ours = counted(lambda: lowbit.scaled_dot_product_attention(q, k, v, enable_gqa=True).sum().backward())
    assert ours == 2 * 2 * 4 * 7 * 9 * 32 * 2 * 3.5 and theirs in (0, 2 * 2 * 4 * 7 * 9 * 32 * 2)


def test_a_scan_counts_its_products_with_the_state() -> None:
    x, dt, a = torch.randn(2, 7, 4, 8, requires_grad=True), torch.rand(2, 7, 4), -torch.rand(4)
    b, c = torch.randn(2, 2, 7, 2, 16)
    with torch.no_grad():
        y, state = lowbit.ssd(x, dt, a, b, c)
        assert counted(lambda: lowbit.ssd(x, dt, a, b, c)) == 4 * y.numel() * 16
        assert counted(lambda: lowbit.ssd(x, dt, a, b, c, state=state, in_place=True)) == 4 * y.numel() * 16
    assert counted(lambda: lowbit.ssd(x, dt, a, b, c)[0].sum().backward()) == (4 + 12) * y.numel() * 16


def test_a_selective_scan_counts_its_products_with_the_state() -> None:
    x, dt, a = torch.randn(2, 7, 32, requires_grad=True), torch.rand(2, 7, 32), -torch.rand(32, 16)
    b, c = torch.randn(2, 2, 7, 16)
    with torch.no_grad():
        y, state = lowbit.selective_scan(x, dt, a, b, c)
        assert counted(lambda: lowbit.selective_scan(x, dt, a, b, c)) == 8 * y.numel() * 16
        assert counted(lambda: lowbit.selective_scan(x, dt, a, b, c, state=state, in_place=True)) == 8 * y.numel() * 16
    assert counted(lambda: lowbit.selective_scan(x, dt, a, b, c)[0].sum().backward()) == (8 + 30) * y.numel() * 16


def test_a_causal_convolution_counts_its_taps() -> None:
    x, weight = torch.randn(2, 7, 24), torch.randn(24, 4, requires_grad=True)
    with torch.no_grad():
        assert counted(lambda: lowbit.causal_conv1d(x, weight)) == 2 * 2 * 7 * 24 * 4
    assert counted(lambda: lowbit.causal_conv1d(x, weight)[0].sum().backward()) == 2 * 2 * 7 * 24 * 4 * 4
