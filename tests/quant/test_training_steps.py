# SPDX-License-Identifier: Apache-2.0
"""A fused gated MLP in training is one Function: its gradients beside float64, and what runs the module's own code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from roundings import assert_close
from torch import Tensor, nn

peft = pytest.importorskip("peft")

import lowbit  # noqa: E402

K, N = 96, 160
ROWS = (2, 7)
FUNCTION = "_LoraGatedMLPBackward"
LAYERS = ["gate_proj", "up_proj", "down_proj"]
ACTIVATIONS = [nn.SiLU(), nn.GELU(), nn.GELU("tanh"), nn.ReLU()]


class GatedMLP(nn.Module):
    def __init__(self, act_fn: nn.Module, bias: bool) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(K, N, bias), nn.Linear(K, N, bias)
        self.down_proj, self.act_fn, self.drops = nn.Linear(N, K, bias), act_fn, 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return nn.functional.dropout(y, self.drops, training=self.training)


def adapted(
    act_fn: nn.Module | None = None, bias: bool = False, drops: float = 0.0, targets: list[str] = LAYERS, **options: Any
) -> Any:
    """Return a packed and fused MLP with adapters, in training."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"mlp": GatedMLP(act_fn or nn.SiLU(), bias)})
    model["mlp"].drops = drops
    dtype = options.pop("dtype", torch.float32)
    lowbit.quantize_(model.to(dtype), options.pop("config", lowbit.int4_weight_only(32)))
    model.requires_grad_(False)
    model.forward = None  # peft looks for one
    if targets:
        options = {"r": 4, "lora_alpha": 6, "init_lora_weights": False, **options}
        peft.inject_adapter_in_model(peft.LoraConfig(target_modules=targets, **options), model)
    lowbit.fuse(model)
    for factor in factors(model):  # peft makes them in float32
        factor.data = factor.data.to(dtype)
    return model["mlp"].train()


def factors(mlp: nn.Module) -> list[Tensor]:
    return [parameter for name, parameter in mlp.named_parameters() if "lora_" in name]


def results(mlp: Any, x: Tensor, grad: Tensor, forward: Any = None) -> list[Tensor]:
    """Return y and the gradients by x and all factors."""
    x = x.clone().requires_grad_()
    y = forward(x) if forward else mlp(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *factors(mlp)], grad)]


def in_float64(mlp: Any, x: Tensor, grad: Tensor) -> list[Tensor]:
    """The same by autograd through the formula."""
    x = x.double().requires_grad_()
    wide = {name: p.detach().double().requires_grad_() for name, p in mlp.named_parameters() if "lora_" in name}

    def product(name: str, x: Tensor) -> Tensor:
        layer = mlp.get_submodule(name)
        base = getattr(layer, "base_layer", layer)
        y = nn.functional.linear(x, base.dequantize().double(), None if base.bias is None else base.bias.double())
        for adapter in getattr(layer, "scaling", {}):
            down, up = (wide[f"{name}.lora_{part}.{adapter}.weight"] for part in "AB")
            y = y + layer.scaling[adapter] * x @ down.T @ up.T
        return y

    y = product("down_proj", mlp.act_fn(product("gate_proj", x)) * product("up_proj", x))
    return [y.detach(), *torch.autograd.grad(y, [x, *wide.values()], grad.double())]


@pytest.mark.parametrize("targets", [LAYERS, ["up_proj"], ["gate_proj", "down_proj"], []], ids=" ".join)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("act_fn", ACTIVATIONS, ids=str)
def test_an_mlp_has_the_gradients_of_float64(act_fn: nn.Module, bias: bool, targets: list[str]) -> None:
    mlp, x, grad = adapted(act_fn, bias, targets=targets), torch.randn(*ROWS, K), torch.randn(*ROWS, K)
    assert type(mlp(x.clone().requires_grad_()).grad_fn).__name__ == FUNCTION
    # Three products, one behind the other, of at most N + rank terms each; the largest value is above a mean term.
    assert_close(results(mlp, x, grad), in_float64(mlp, x, grad), 3 * (N + 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_an_mlp_in_16_bits(dtype: torch.dtype) -> None:
    mlp, x, grad = adapted(dtype=dtype), torch.randn(*ROWS, K).to(dtype), torch.randn(*ROWS, K).to(dtype)
    assert type(mlp(x.clone().requires_grad_()).grad_fn).__name__ == FUNCTION
    assert_close(results(mlp, x, grad), in_float64(mlp, x, grad), 16, dtype)  # one for each result that is rounded


def test_int8_activations_are_those_of_the_layers() -> None:
    mlp, x, grad = (
        adapted(config=lowbit.int8_dynamic_activation_int4_weight(32)),
        torch.randn(*ROWS, K),
        torch.randn(*ROWS, K),
    )
    theirs = results(mlp, x, grad, lambda x: GatedMLP.forward(mlp, x))
    assert_close(results(mlp, x, grad), [each.double() for each in theirs], 3 * (N + 4))


def test_gradients_of_gradients_are_those_of_the_layers() -> None:
    mlp = adapted(nn.GELU(), bias=True)

    def second_order(forward: Any) -> list[Tensor]:
        x = torch.linspace(-1, 1, 3 * K).view(K, 3).T.requires_grad_()
        trained = [x, *factors(mlp)]
        first = torch.autograd.grad(forward(x).square().sum(), trained, create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().mean() for g in first), trained)]

    for ours, theirs in zip(second_order(mlp), second_order(lambda x: GatedMLP.forward(mlp, x)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.detach().abs().max()))


def test_checkpointing_changes_no_gradient() -> None:
    mlp, x, grad = adapted(), torch.randn(*ROWS, K), torch.randn(*ROWS, K)
    again = results(mlp, x, grad, lambda x: torch.utils.checkpoint.checkpoint(mlp, x, use_reentrant=False))
    assert all(map(torch.equal, results(mlp, x, grad), again))


def test_only_what_is_trained_gets_a_gradient() -> None:
    mlp, x = adapted(), torch.randn(*ROWS, K)
    for factor in factors(mlp)[1:]:
        factor.requires_grad_(False)
    mlp(x).sum().backward()
    assert [factor.grad is not None for factor in factors(mlp)] == [True] + 5 * [False]
    factors(mlp)[0].requires_grad_(False)
    assert not mlp(x).requires_grad


def _dropout(mlp: Any) -> None:
    mlp.up_proj.lora_dropout["default"] = nn.Dropout(0.5)


def _hook(mlp: Any) -> None:
    mlp.down_proj.register_forward_hook(lambda module, args, out: out * 2)


def _hook_on_the_base(mlp: Any) -> None:
    mlp.gate_proj.base_layer.register_forward_hook(lambda module, args, out: out * 2)


def _trained_bias(mlp: Any) -> None:
    mlp.down_proj.base_layer.bias.requires_grad_()


def _other_dtype(mlp: Any) -> None:
    mlp.gate_proj.lora_A.bfloat16(), mlp.gate_proj.lora_B.bfloat16()


def _drops_now(mlp: Any) -> None:
    mlp.drops = 0.5


@pytest.mark.parametrize(
    "change",
    [_dropout, _hook, _hook_on_the_base, _trained_bias, _other_dtype, _drops_now],
    ids=lambda f: f.__name__.strip("_"),
)
def test_other_calls_run_the_modules_code(change: Any) -> None:
    mlp, x = adapted(bias=True), torch.randn(*ROWS, K)
    change(mlp)
    mlp.train()
    torch.manual_seed(1)
    y = mlp(x)
    torch.manual_seed(1)
    assert type(y.grad_fn).__name__ != FUNCTION
    assert torch.equal(y, GatedMLP.forward(mlp, x))


def test_dora_and_dropout_of_the_module_run_its_code() -> None:
    x = torch.randn(*ROWS, K)
    assert type(adapted(use_dora=True)(x).grad_fn).__name__ != FUNCTION
    mlp = adapted(drops=0.5)
    assert bool((mlp(x) == 0).any()) and type(mlp(x).grad_fn).__name__ != FUNCTION


def test_gradients_add_up_over_two_steps() -> None:
    mlp, x = adapted(), torch.randn(*ROWS, K)
    mlp(x).sum().backward()
    once = [factor.grad.clone() for factor in factors(mlp)]
    mlp(x).sum().backward()
    for factor, first in zip(factors(mlp), once, strict=True):
        assert torch.equal(factor.grad, 2 * first)
    assert len({factor.grad.data_ptr() for factor in factors(mlp)}) == 6
