# SPDX-License-Identifier: Apache-2.0
"""install(): torch's names run on ours, in eager mode and compiled, and uninstall() puts everything back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.bias import causal_lower_right

import lowbit
from lowbit import _C
from lowbit.attention import install, installed, uninstall


@pytest.fixture
def installation() -> Iterator[None]:
    install()
    yield
    uninstall()
    torch._dynamo.reset()


def test_torchs_functions_run_on_ours_and_back() -> None:
    before = torch_flex.flex_attention, torch_flex.create_block_mask, functional.scaled_dot_product_attention
    install()
    install()
    try:
        assert installed() and torch_flex.flex_attention is not before[0]
    finally:
        uninstall()
    assert (torch_flex.flex_attention, torch_flex.create_block_mask, functional.scaled_dot_product_attention) == before
    assert not installed()


def test_training_with_torchs_names(installation: None) -> None:
    q, k, v = (torch.randn(1, 2, 200, 16, requires_grad=True) for _ in range(3))
    bias = torch.randn(200, 200, requires_grad=True)
    mask = torch_flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 200, 200)
    torch_flex.flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[i, j], mask).sum().backward()
    assert all(tensor.grad is not None for tensor in (q, k, v, bias))
    functional.scaled_dot_product_attention(q, k, v)
    assert str(_C.last_kernel("attention_forward")).startswith("attention_forward")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_calls_of_torchs_flex_attention(installation: None, backend: str) -> None:
    q, k, v = (torch.randn(1, 2, 200, 16, requires_grad=True) for _ in range(3))
    bias = torch.randn(200, 200, requires_grad=True)
    mask = lowbit.create_block_mask(lambda b, h, q, k: q >= k, None, None, 200, 200)

    def run(function: object) -> list[torch.Tensor]:
        out = function(q, k, v, lambda s, b, h, i, j: s + bias[i, j], mask)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v, bias))]

    for ours, wanted in zip(run(torch.compile(torch_flex.flex_attention, fullgraph=True, backend=backend)), run(lowbit.flex_attention), strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-5)


def test_errors_are_of_torchs_kind(installation: None, subtests: pytest.Subtests) -> None:
    q = torch.randn(1, 2, 8, 16)
    for arguments, text in (
        ((q, q, q[..., :8, :].double()), "value must be float32, got float64"),
        ((q[0, 0, 0],) * 3, "dimensions"),
        ((q, q[:, :, :, :4], q), r"key must have shape \[1, 2, 8, 16\]"),
    ):
        with subtests.test(text), pytest.raises(RuntimeError, match=text):
            functional.scaled_dot_product_attention(*arguments)


def test_causal_bias_runs_on_ours_and_a_tensor_with_rules_of_its_own_keeps_them(installation: None) -> None:
    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
            return "watched" if func is functional.scaled_dot_product_attention else super().__torch_function__(func, types, args, kwargs or {})

    q, k = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 12, 16)
    found = functional.scaled_dot_product_attention(q, k, k, causal_lower_right(8, 12))
    torch.testing.assert_close(found, lowbit.scaled_dot_product_attention(q, k, k, torch.ones(8, 12, dtype=torch.bool).tril(4)))
    with pytest.raises(ValueError, match="CausalBias should not be used with causal=True"):
        functional.scaled_dot_product_attention(q, k, k, causal_lower_right(8, 12), is_causal=True)
    assert functional.scaled_dot_product_attention(q, k.as_subclass(Watched), k) == "watched"


def test_torchscript_goes_on_to_call_torch(installation: None) -> None:
    def attend(q: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, q, q)

    q = torch.randn(1, 2, 8, 16)
    torch.testing.assert_close(torch.jit.script(attend)(q), lowbit.scaled_dot_product_attention(q, q, q))
