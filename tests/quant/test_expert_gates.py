# SPDX-License-Identifier: Apache-2.0
"""The step between the products of experts: which of the op's it is, that any other one is the class's own, and what changes
it later; all beside float64, where clamps cut and where they do not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expert_modules import Experts, InTurns, Turned, Ungated, decoded, layer_of, made, routed
from torch import Tensor, nn
from torch.nn import functional

import lowbit
from lowbit import _C
from lowbit.ops.experts import ACTIVATIONS, Gate
from lowbit.testing import assert_within

SILU = ACTIVATIONS.index("silu")


def halves(hidden: Tensor) -> tuple[Tensor, Tensor]:
    return hidden.chunk(2, dim=-1)


def turns(hidden: Tensor) -> tuple[Tensor, Tensor]:
    return hidden[..., ::2], hidden[..., 1::2]


def clamped(gate: Tensor, up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    return gate.clamp(max=limit), up.clamp(-limit, limit)


def of_gpt_oss(self: Any, hidden: Tensor) -> Tensor:
    gate, up = clamped(*(turns if self.turns else halves)(hidden), self.limit)
    return (up + 1) * gate * torch.sigmoid(self.alpha * gate)


def of_deepseek(self: Any, hidden: Tensor) -> Tensor:
    gate, up = clamped(*halves(hidden), self.limit)
    return self.act_fn(gate) * up


def of_beam(self: Any, hidden: Tensor) -> Tensor:
    gate, up = halves(hidden)
    return (self.act_fn(gate.float()) * up.float()).to(gate.dtype)


def of_turns(self: Any, hidden: Tensor) -> Tensor:
    gate, up = turns(hidden)
    return self.act_fn(gate) * up


def with_step(base: type[Experts], step: Callable[..., Tensor] | None = None, act_fn: Any = None, **attributes: Any) -> Experts:
    """Experts with another step: ``_apply_gate`` or ``act_fn``, and numbers of the module."""
    cls = type(f"{base.__name__}With", (base,), {} if step is None else {"_apply_gate": step})
    experts = made(cls, bias=True)
    if act_fn is not None:
        del experts.act_fn
        experts.act_fn = act_fn
    vars(experts).update(attributes)
    return experts


OSS = {"alpha": 1.702, "limit": 7.0}


@pytest.mark.parametrize(("make", "gate"), [
    (lambda: with_step(Experts), Gate(SILU, True, False, 1.0, 0.0, 0.0)),
    (lambda: with_step(InTurns), Gate(SILU, True, False, 1.0, 0.0, 0.0)),
    (lambda: with_step(Experts, of_turns), Gate(SILU, True, True, 1.0, 0.0, 0.0)),
    (lambda: with_step(Experts, of_beam), Gate(SILU, True, False, 1.0, 0.0, 0.0)),
    (lambda: with_step(InTurns, of_gpt_oss, **OSS), Gate(SILU, True, False, 1.702, 7.0, 1.0)),
    (lambda: with_step(Experts, of_gpt_oss, **OSS), Gate(SILU, True, False, 1.702, 7.0, 1.0)),
    (lambda: with_step(Experts, of_gpt_oss, alpha=0.75, limit=2), Gate(SILU, True, False, 0.75, 2.0, 1.0)),
    (lambda: with_step(Turned, of_deepseek, limit=10.0), Gate(SILU, True, False, 1.0, 10.0, 0.0)),
    (lambda: with_step(Experts, of_deepseek, limit=1e5), Gate(SILU, True, False, 1.0, 1e5, 0.0)),
    (lambda: with_step(Experts, act_fn=nn.GELU()), Gate(ACTIVATIONS.index("gelu"), True, False, 1.0, 0.0, 0.0)),
    (lambda: with_step(Experts, act_fn=nn.GELU("tanh")), Gate(ACTIVATIONS.index("gelu_tanh"), True, False, 1.0, 0.0, 0.0)),
    (lambda: with_step(Experts, act_fn=nn.ReLU()), Gate(ACTIVATIONS.index("relu"), True, False, 1.0, 0.0, 0.0)),
    (lambda: with_step(Experts, act_fn=nn.Identity()), Gate(ACTIVATIONS.index("none"), True, False, 1.0, 0.0, 0.0)),
    (lambda: with_step(Experts, act_fn=lambda x: x * torch.sigmoid(1.702 * x)), Gate(SILU, True, False, 1.702, 0.0, 0.0)),
    (lambda: with_step(Ungated, act_fn=lambda x: x.relu().square()), Gate(ACTIVATIONS.index("relu_squared"), False, False, 1.0, 0.0, 0.0)),
    (lambda: with_step(Ungated), Gate(SILU, False, False, 1.0, 0.0, 0.0)),
])  # fmt: skip
@torch.no_grad()
def test_a_step_that_the_op_has_is_found_and_computed(make: Callable[[], Experts], gate: Gate) -> None:
    experts = make()
    report = lowbit.quantize_(experts, lowbit.int8_weight_only())
    assert experts.op_gate == gate
    for size in (1.0, 12.0):  # sums of about 12, which limits of 7 cut
        x, index, weights = routed()
        y = experts(x * size, index, weights)
        assert [row.kernel for row in report.rows] == [_C.last_kernel("experts")] * 2
        assert_within(y, *layer_of(experts)(x * size, index, weights), str(gate))


def product_of(step: Callable[[Any, Tensor, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda self, hidden: step(self, *halves(hidden))


@pytest.mark.parametrize("make", [
    lambda: with_step(Experts, product_of(lambda self, gate, up: self.act_fn(gate).clamp(max=self.limit) * up), limit=0.5),  # Step 3.7
    lambda: with_step(Experts, product_of(lambda self, gate, up: self.act_fn(gate.clamp(-self.limit, self.limit)) * up), limit=7.0),
    lambda: with_step(Experts, product_of(lambda self, gate, up: self.act_fn(gate.clamp(max=2.0)) * up.clamp(-1, 1))),
    lambda: with_step(Experts, product_of(lambda self, gate, up: self.act_fn(gate.clamp(max=30.0)) * up)),  # far from most sums
    lambda: with_step(Experts, product_of(lambda self, gate, up: self.act_fn(gate) * up.clamp(max=5e4))),
    lambda: with_step(Experts, product_of(lambda self, gate, up: self.act_fn(gate) * up.clamp(min=-5e4))),
    lambda: with_step(Experts, product_of(lambda self, gate, up: self.act_fn(gate) * (up + 0.5))),
    lambda: with_step(Experts, product_of(lambda self, gate, up: self.act_fn(gate) * (up + 1e-3))),
    lambda: with_step(Experts, product_of(lambda self, gate, up: self.act_fn(up) * gate)),
    lambda: with_step(InTurns, lambda self, hidden: self.act_fn(halves(hidden)[0]) * halves(hidden)[1]),
    lambda: with_step(Experts, product_of(lambda self, gate, up: gate.softmax(-1) * up)),
    lambda: with_step(Experts, product_of(lambda self, gate, up: self.act_fn(gate) * up * (0.5 if self.training else 1.0))),
    lambda: with_step(Experts, act_fn=nn.SELU()),
    lambda: with_step(Experts, act_fn=nn.PReLU(init=0.0)),  # a relu as long as it is not trained
    lambda: with_step(Ungated, act_fn=nn.Hardtanh(-1.0, 1.0)),
])  # fmt: skip
@torch.no_grad()
def test_any_other_step_is_that_of_the_class_between_two_products(make: Callable[[], Experts]) -> None:
    experts = make().eval()
    report = lowbit.quantize_(experts, lowbit.int8_weight_only())
    assert experts.op_gate is None
    exact = decoded(experts)
    for size in (1.0, 12.0):
        x, index, weights = routed()
        y = experts(x * size, index, weights)
        assert [row.kernel for row in report.rows] == [_C.last_kernel("gather_linear")] * 2
        wanted = exact(x.double() * size, index, weights.double())
        assert (y - wanted).norm() <= 2e-6 * wanted.norm()


@torch.no_grad()
def test_another_limit_or_activation_is_another_step() -> None:
    experts = with_step(InTurns, of_gpt_oss, **OSS)
    lowbit.quantize_(experts, lowbit.int4_weight_only(group_size=32))
    x, index, weights = routed()
    experts.limit = 0.5
    assert experts.op_gate == Gate(SILU, True, False, 1.702, 0.5, 1.0)
    assert_within(experts(x, index, weights), *layer_of(experts)(x, index, weights), "limit 0.5")
    experts = made(bias=True)
    lowbit.quantize_(experts, lowbit.int4_weight_only(group_size=32))
    experts.act_fn = nn.ReLU()
    assert experts.op_gate == Gate(ACTIVATIONS.index("relu"), True, False, 1.0, 0.0, 0.0)
    assert_within(experts(x, index, weights), *layer_of(experts)(x, index, weights), "relu")
    experts.act_fn = nn.SELU()
    assert experts.op_gate is None
    wanted = decoded(experts)(x.double(), index, weights.double())
    assert (experts(x, index, weights) - wanted).norm() <= 2e-6 * wanted.norm()
    experts.act_fn = nn.SiLU()
    kept = copy.deepcopy(experts).train()
    assert kept.op_gate == Gate(SILU, True, False, 1.0, 0.0, 0.0)


def test_hooks_of_an_activation_are_called() -> None:
    experts = made(bias=True)
    lowbit.quantize_(experts, lowbit.int4_weight_only(group_size=32))
    x, index, weights = routed()
    seen: list[torch.Size] = []
    handle = experts.act_fn.register_forward_hook(lambda module, given, y: seen.append(y.shape))
    with_hook = experts(x, index, weights)
    assert seen == [(*index.shape, 36)]
    handle.remove()
    torch.testing.assert_close(experts(x, index, weights), with_hook)
    assert len(seen) == 1


def test_gradients_go_through_clamps() -> None:
    experts = with_step(InTurns, of_gpt_oss, alpha=1.702, limit=1.0)
    lowbit.quantize_(experts, lowbit.int8_weight_only())
    exact = decoded(experts)
    x, index, weights = routed()
    grad = torch.randn(len(x), x.shape[1])
    found = []
    for module, dtype in ((experts, torch.float32), (exact, torch.float64)):
        given = x.to(dtype).requires_grad_(), weights.to(dtype).requires_grad_()
        biases = [getattr(module, f"{key}_bias") for key in ("gate_up_proj", "down_proj")]
        found.append(torch.autograd.grad(module(given[0], index, given[1]), [*given, *biases], grad.to(dtype)))
    for got, wanted in zip(*found, strict=True):
        assert (got - wanted).norm() <= 1e-5 * wanted.norm()


def test_packing_leaves_the_module_and_the_generator_as_they_are() -> None:
    def step(self: Any, hidden: Tensor) -> Tensor:
        gate, up = halves(hidden)
        return functional.dropout(self.act_fn(gate) * up, training=self.training)

    experts = with_step(Experts, step).eval()
    state = torch.get_rng_state()
    lowbit.quantize_(experts, lowbit.int8_weight_only())
    assert not experts.training and not experts.act_fn.training and experts.op_gate is None
    assert torch.equal(torch.get_rng_state(), state)
