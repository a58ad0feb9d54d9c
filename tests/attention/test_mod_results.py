# SPDX-License-Identifier: Apache-2.0
"""Mods whose result or whose captured tensors have an unusual form, and torch's global defaults while a mod is traced."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from settings import ambient
from torch import Tensor
from torch.nn import functional

import lowbit
from lowbit.score import program_cache

Mod = Callable[..., Tensor]


def check(mod: Mod, captured: list[Tensor], lengths: tuple[int, int], tolerance: float = 2e-5) -> None:
    """Result, lse and all gradients against the dense reference in float64."""
    q, k, v = (torch.randn(1, 2, length, 16, requires_grad=True) for length in (lengths[0], lengths[1], lengths[1]))
    wanted_inputs = [q, k, v, *(tensor for tensor in captured if tensor.requires_grad)]
    scores = (q.double() @ k.double().transpose(-2, -1)) / 4
    place = torch.meshgrid(*(torch.arange(size) for size in scores.shape), indexing="ij")
    scores = mod(scores, *place).double()
    wanted = torch.softmax(scores, -1) @ v.double(), torch.logsumexp(scores, -1)
    got = lowbit.flex_attention(q, k, v, mod, return_aux=lowbit.AuxRequest(lse=True))
    got = got[0], got[1].lse
    grads = [torch.autograd.grad(out.double().sin().sum() + lse.double().square().sum(), wanted_inputs, allow_unused=True) for out, lse in (wanted, got)]
    for ours, theirs in [*zip(got, wanted, strict=True), *zip(grads[1], grads[0], strict=True)]:
        theirs = torch.zeros_like(ours) if theirs is None else theirs
        ours = torch.zeros_like(theirs) if ours is None else ours
        torch.testing.assert_close(ours.double(), theirs.double(), atol=tolerance, rtol=1e-3)


@pytest.mark.parametrize("lengths", [(128, 128), (24, 136), (64, 48), (1, 16), (50, 50)], ids=str)
def test_a_result_that_is_a_gather_replaces_the_scores(lengths: tuple[int, int], forward_row: str) -> None:
    """A tensor cannot stand in for the memory of the scores: it wrote 16 bytes before the machine."""
    rows, columns = lengths
    table, both = torch.randn(rows, columns), torch.randn(2, rows, columns, requires_grad=True)
    check(lambda s, b, h, q, k: table[q, k], [], lengths)
    check(lambda s, b, h, q, k: table[rows - 1 - q, k], [], lengths)
    check(lambda s, b, h, q, k: both[h, q, k], [both], lengths)
    check(lambda s, b, h, q, k: table.double()[q, columns - 1 - k], [], lengths)


def test_a_floor_sees_an_exact_quotient() -> None:
    """49 * (1 / 49) is less than 1 in float32: only scores may be multiplied by an inverse."""
    for divisor in (3, 7, 41, 47, 49, 55, 61, 82, 83, 94, 97, 98, 99, 100):
        check(lambda s, b, h, q, k, divisor=divisor: s + torch.floor((q * 1) / divisor) - torch.floor((k * q) / divisor) * 0.125, [], (101, 103), 1e-4)


def test_a_captured_index_into_a_dimension_of_one() -> None:
    table, index = torch.randn(1, 4), torch.tensor(0)
    check(lambda s, b, h, q, k: s + table[index, 3] + table[index][h], [], (9, 9))


@pytest.mark.parametrize("change", [lambda x: x.reshape(-1), lambda x: x.flatten(), lambda x: x.view(2, 3).reshape(6), lambda x: x.reshape(3, 2).t().reshape(6)])
def test_a_captured_tensor_of_any_strides_can_be_reshaped(change: Callable[[Tensor], Tensor]) -> None:
    contiguous = torch.randn(2, 3, requires_grad=True)
    mod_of = lambda table: lambda s, b, h, q, k: s + change(table)[k % 6]  # noqa: E731
    check(mod_of(contiguous), [contiguous], (5, 7))
    base = torch.randn(3, 2)
    check(mod_of(base.t().contiguous()), [], (5, 7))
    table = base.t()
    wanted = base.t().contiguous()
    ours = program_cache.bind("test", lambda s, b, h, q, k: s + change(table)[k % 6], mask=False).captured[0]
    assert torch.equal(ours, change(wanted))


@pytest.mark.parametrize("value", [True, False])
def test_a_mask_that_is_a_captured_tensor(value: bool) -> None:
    flag, flags = torch.tensor(value), torch.tensor([value, not value])
    one = lowbit.create_block_mask(lambda b, h, q, k: flag, None, None, 64, 64, BLOCK_SIZE=16)
    assert one.sparsity() == (0 if value else 100)
    per_head = lowbit.create_block_mask(lambda b, h, q, k: flags[h], None, 2, 64, 64, BLOCK_SIZE=16)
    assert per_head.sparsity() == 50


@pytest.mark.parametrize("through_torch", [False, True])
@pytest.mark.parametrize("setting", ["device meta", "dtype float64"])
def test_torchs_defaults_do_not_matter(setting: str, through_torch: bool) -> None:
    inputs, bias = [torch.randn(1, 2, 40, 16) for _ in range(3)], torch.randn(2, 40)
    ids = torch.arange(40) // 10

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        s = s + torch.special.bessel_j0(s) if through_torch else s
        return s + torch.softmax(bias, -1)[h, q] * 0.5 + (k / 40) + bias[h, [1, 2, 3]].sum()

    def run() -> Tensor:
        mask = lowbit.create_block_mask(lowbit.attention.masks.document(ids, lowbit.attention.masks.causal), None, None, 40, 40, "cpu", BLOCK_SIZE=16)
        assert mask.mask_mod.dense(8).shape == (8, 8)
        return lowbit.flex_attention(*inputs, score_mod, mask)

    program_cache._warned.clear()
    wanted = run()
    with ambient(f"default {setting}"):
        found = run()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["logsigmoid", "softplus", "mish", "hardswish", "hardsigmoid", "elu", "selu", "relu6", "silu", "gelu", "hardtanh", "softsign", "tanhshrink"])
def test_activations_are_programs(name: str) -> None:
    function = getattr(functional, name)
    mod = lambda s, b, h, q, k: function(s * 3)  # noqa: E731
    program_cache.bind("test", mod, mask=False)  # else UnknownOp
    check(mod, [], (17, 33), 2e-4)


@pytest.mark.parametrize("name", ["relu", "leaky_relu", "logsigmoid", "softplus", "mish", "hardswish", "hardsigmoid", "elu", "relu6", "silu", "gelu", "hardtanh"])
def test_activations_of_nan_are_nan(name: str) -> None:
    function, table = getattr(functional, name), torch.tensor([0.0, 3.0, torch.nan, -2.0])
    assert function(table)[2].isnan()
    check(lambda s, b, h, q, k: torch.where(torch.isnan(function(table[k % 4])), s, s - 1), [], (5, 20))


@pytest.mark.parametrize("make", [torch.isfinite, torch.isinf, torch.isnan])
def test_tests_of_infinities_are_programs(make: Callable[[Tensor], Tensor]) -> None:
    table = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan, 1e38])
    check(lambda s, b, h, q, k: torch.where(make(table[k % 5]), s, s - 1), [], (5, 20))


def test_another_thread_may_draw_random_numbers_while_a_mod_is_traced() -> None:
    stop = threading.Event()

    def draw() -> None:
        while not stop.is_set():
            torch.rand(3)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for number in range(50):
            program_cache.bind("test", lambda s, b, h, q, k, number=number: s * number + torch.tensor(2.0), mask=False)
    finally:
        stop.set()
        thread.join()


def test_a_mask_that_may_be_nan_is_not_decided_by_intervals() -> None:
    table = torch.tensor([0.0, torch.nan, 1.0, 2.0] * 16)
    for mask_mod in (
        lambda b, h, q, k: (table[q] - table[k]).abs() >= 0,
        lambda b, h, q, k: torch.maximum(table[q], table[k]) >= torch.minimum(table[q], table[k]),
        lambda b, h, q, k: table[q] + table[k] <= torch.inf,
    ):
        mask = lowbit.create_block_mask(mask_mod, None, None, 64, 64, BLOCK_SIZE=16)
        assert mask.full_kv_num_blocks.sum() == 0
