# SPDX-License-Identifier: Apache-2.0
"""LoRA of peft over packed layers in training: one Function, its numbers and gradients in float64, and what peft's code
still computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

peft = pytest.importorskip("peft")

import lowbit  # noqa: E402
from lowbit.testing import ROUNDOFF  # noqa: E402

K, N, RANK = 70, 52, 4
FUNCTION = "_LoraLinearBackward"


def adapted(dtype: torch.dtype = torch.float32, bias: bool = True, **options: Any) -> Any:
    """Return a LoRA layer over int4 in groups of 32, with two adapters where ``second`` is asked for."""
    torch.manual_seed(0)
    second = options.pop("second", False)
    model = nn.Sequential(nn.Linear(K, N, bias=bias, dtype=dtype))
    lowbit.quantize_(model, lowbit.int4_weight_only(32))
    config = peft.LoraConfig(r=RANK, lora_alpha=3 * RANK, target_modules=["0"], **options)
    tuned = peft.get_peft_model(model, config)
    if second:
        tuned.add_adapter("other", peft.LoraConfig(r=2, lora_alpha=1, target_modules=["0"]))
        tuned.base_model.set_adapter(["default", "other"])
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape).to(dtype)
            parameter.requires_grad_()
    return tuned.base_model.model[0]


def factors(layer: Any) -> list[tuple[Tensor, Tensor, float]]:
    return [(layer.lora_A[a].weight, layer.lora_B[a].weight, layer.scaling[a]) for a in layer.active_adapters]


def results(layer: Any, x: Tensor, grad: Tensor, forward: Any = None) -> list[Tensor]:
    """Return y and the gradients by x and all factors."""
    x = x.clone().requires_grad_()
    y = forward(layer, x) if forward else layer(x)
    trained = [x, *(f for down, up, _ in factors(layer) for f in (down, up))]
    return [y.detach(), *torch.autograd.grad(y, trained, grad)]


def wanted(layer: Any, x: Tensor, grad: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the same in float64, each with the sum of magnitudes, as a rounding of whose is what a float may miss."""
    x, grad, base = x.double().flatten(0, -2), grad.double().flatten(0, -2), layer.base_layer
    w = base.dequantize().double()
    bias = torch.zeros(N) if base.bias is None else base.bias.double()
    y, size = x @ w.T + bias, x.abs() @ w.abs().T + bias.abs()
    of_x, size_x, of_factors = grad @ w, grad.abs() @ w.abs(), []
    for down, up, s in [(a.double(), b.double(), s) for a, b, s in factors(layer)]:
        y, size = y + s * x @ down.T @ up.T, size + s * x.abs() @ down.abs().T @ up.abs().T
        of_x, size_x = of_x + s * grad @ up @ down, size_x + s * grad.abs() @ up.abs() @ down.abs()
        of_factors.append((s * (grad @ up).T @ x, s * (grad.abs() @ up.abs()).T @ x.abs()))
        of_factors.append((s * grad.T @ (x @ down.T), s * grad.abs().T @ (x.abs() @ down.abs().T)))
    return [(y, size), (of_x, size_x), *of_factors]


@pytest.mark.parametrize("second", [False, True], ids=["one adapter", "two adapters"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("shape", [(1,), (33,), (2, 3, 5), (0,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_numbers_and_gradients(dtype: torch.dtype, shape: tuple[int, ...], bias: bool, second: bool) -> None:
    layer = adapted(dtype, bias, second=second)
    x, grad = torch.randn(*shape, K).to(dtype), torch.randn(*shape, N).to(dtype)
    assert type(layer(x).grad_fn).__name__ == FUNCTION
    # Sums of at most k + n + rank terms in float32, and a rounding to the dtype of each factor, product and sum.
    allowed = (K + N + RANK + 16) * ROUNDOFF["float32"] + 8 * ROUNDOFF[str(dtype).removeprefix("torch.")]
    for ours, (exact, size) in zip(results(layer, x, grad), wanted(layer, x, grad), strict=True):
        assert ours.dtype is dtype
        missed = (ours.double().reshape(exact.shape) - exact).abs()
        assert bool((missed <= allowed * size + torch.finfo(dtype).smallest_normal).all())


@pytest.mark.parametrize("strided", [False, True])
def test_gradients_of_gradients_are_those_of_pefts_code(strided: bool) -> None:
    layer = adapted(second=True)
    of_peft = type(layer).forward.__wrapped__

    def second_order(forward: Any) -> list[Tensor]:
        x = (torch.linspace(-1, 1, 6 * K).view(K, 6).T if strided else torch.linspace(-1, 1, 6 * K).view(6, K)).requires_grad_()
        trained = [x, *(f for down, up, _ in factors(layer) for f in (down, up))]
        first = torch.autograd.grad(forward(x).square().sum(), trained, create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().mean() for g in first), trained)]

    for ours, theirs in zip(second_order(layer), second_order(lambda x: of_peft(layer, x)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.detach().abs().max()))


def test_only_what_is_trained_gets_a_gradient() -> None:
    layer = adapted()
    (down, up, _), x = factors(layer)[0], torch.randn(3, K)
    down.requires_grad_(False)
    layer(x).sum().backward()
    assert x.grad is None and down.grad is None and up.grad is not None
    up.requires_grad_(False)
    assert not layer(x).requires_grad  # nothing is recorded
    x.requires_grad_()
    assert type(layer(x).grad_fn).__name__ == FUNCTION


def _dropout(layer: Any) -> Any:
    layer.lora_dropout["default"] = nn.Dropout(0.5)
    return layer.train()


def _hook(layer: Any) -> Any:
    layer.lora_B["default"].register_forward_hook(lambda module, args, out: out * 2)
    return layer


def _other_dtype(layer: Any) -> Any:
    layer.lora_A.bfloat16(), layer.lora_B.bfloat16()
    return layer


def _bias(layer: Any) -> Any:
    layer.base_layer.bias.requires_grad_()
    return layer


@pytest.mark.parametrize("change", [_dropout, _hook, _other_dtype, _bias], ids=lambda f: f.__name__.strip("_"))
def test_other_calls_run_pefts_code(change: Any) -> None:
    layer, x = change(adapted()), torch.randn(3, K)
    torch.manual_seed(1)
    y = layer(x)
    torch.manual_seed(1)
    assert type(y.grad_fn).__name__ != FUNCTION
    assert torch.equal(y, type(layer).forward.__wrapped__(layer, x))


def test_variants_disabled_and_merged_adapters_run_pefts_code() -> None:
    x = torch.randn(3, K, requires_grad=True)
    assert type(adapted(use_dora=True)(x).grad_fn).__name__ != FUNCTION
    layer = adapted()
    with torch.autocast("cpu", torch.bfloat16):
        assert type(layer(x).grad_fn).__name__ != FUNCTION
    layer.enable_adapters(False)
    assert torch.equal(layer(x), layer.base_layer(x))
    layer.enable_adapters(True)
    layer.merge()
    assert torch.equal(layer(x), layer.base_layer(x))


def test_wrong_features_are_named_as_before() -> None:
    with pytest.raises(RuntimeError, match=r"the last dimension of x must be k=70"):
        adapted()(torch.randn(3, K + 1))


def test_checkpointing_changes_no_gradient() -> None:
    layer, x, grad = adapted(), torch.randn(5, K), torch.randn(5, N)
    kept = results(layer, x, grad)
    again = results(layer, x, grad, lambda of, x: torch.utils.checkpoint.checkpoint(of, x, use_reentrant=False))
    assert all(map(torch.equal, kept, again))
