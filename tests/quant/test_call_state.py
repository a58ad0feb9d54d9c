# SPDX-License-Identifier: Apache-2.0
"""State that changes between two calls of one QuantLinear: the next call sees it."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from settings import in_child
from torch import nn

import lowbit
from lowbit.quant import QuantLinear


def layer(seed: int = 0, bias: bool = True) -> QuantLinear:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(70, 33, bias=bias))
    lowbit.quantize_(model, lowbit.int8_dynamic_activation_int4_weight())
    return model[0]


X = torch.randn(5, 70, generator=torch.Generator().manual_seed(1))


def weight_data(module: QuantLinear, other: QuantLinear) -> None:
    module.weight.data, module.bias.data = other.weight.data.clone(), other.bias.data.clone()


@torch.no_grad()
def in_place(module: QuantLinear, other: QuantLinear) -> None:
    module.weight.copy_(other.weight)
    module.bias.copy_(other.bias)


def parameters(module: QuantLinear, other: QuantLinear) -> None:
    module.weight, module.bias = other.weight, other.bias


CHANGES: dict[str, Callable[[QuantLinear, QuantLinear], Any]] = {
    "weight.data": weight_data,
    "in place": in_place,
    "state_dict": lambda module, other: module.load_state_dict(other.state_dict()),
    "assigned state_dict": lambda module, other: module.load_state_dict(other.state_dict(), assign=True),
    "parameters": parameters,
    "whole dictionary": lambda module, other: setattr(module, "_parameters", other._parameters),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("compiled", [False, True])
def test_other_values_are_seen_however_they_came(change: Callable[[QuantLinear, QuantLinear], Any], compiled: bool) -> None:
    module, other = layer(0), layer(1)
    call = torch.compile(module, backend="aot_eager") if compiled else module
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            before, wanted = call(X), other(X)
            assert torch.equal(before, module(X)) and not torch.equal(before, wanted)
    change(module, other)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            assert torch.equal(call(X), other(X))
    torch.compiler.reset()


def test_a_bias_that_is_replaced_removed_or_of_another_dtype():
    module = layer()
    plain = module(X) - module.bias
    for bias in (torch.zeros(33), torch.ones(33, dtype=torch.bfloat16), torch.ones(33, dtype=torch.float16)):
        module.bias = nn.Parameter(bias)
        torch.testing.assert_close(module(X), plain + bias.float(), rtol=1e-5, atol=1e-5)
    module.bias = None
    torch.testing.assert_close(module(X), plain, rtol=1e-5, atol=1e-5)
    module.bias = nn.Parameter(torch.zeros(34))
    with pytest.raises(ValueError, match=r"linear: bias must be a contiguous \[n=33\], got \[34\]"):
        module(X)


def test_the_dtype_of_x_and_of_the_module_may_change_between_calls():
    module, wanted = layer(), layer()(X)
    for dtype in (torch.bfloat16, torch.float32, torch.float16, torch.float32):
        y = module(X.to(dtype))
        assert y.dtype == dtype
        torch.testing.assert_close(y.float(), wanted, rtol=0, atol=0.05)
    module.to(torch.bfloat16)
    assert module(X.bfloat16()).dtype == torch.bfloat16 and module.weight.dtype == torch.uint8
    with pytest.raises(TypeError, match="got float64"):
        module(X.double())


def test_gradients_asked_for_and_no_longer():
    module, x = layer(), X.clone()
    for _ in range(2):
        for wants_x, wants_bias in ((False, False), (True, False), (False, True), (True, True)):
            x.requires_grad_(wants_x)
            module.bias.requires_grad_(wants_bias)
            y = module(x)
            assert y.requires_grad == (wants_x or wants_bias)
            if y.requires_grad:
                y.sum().backward()
            assert (x.grad is not None) == wants_x and (module.bias.grad is not None) == wants_bias
            x.grad = module.bias.grad = None
            with torch.no_grad():
                assert not module(x).requires_grad
            with torch.inference_mode():
                assert module(x).is_inference()


def test_hooks_that_come_and_go():
    module, wanted, seen = layer(), layer()(X), []
    handles = [
        module.register_forward_hook(lambda *_: seen.append("after")),
        module.register_forward_pre_hook(lambda *_: seen.append("before")),
        module.register_full_backward_hook(lambda *_: seen.append("backward")),
        nn.modules.module.register_module_forward_hook(lambda *_: seen.append("every")),
    ]
    module(X.clone().requires_grad_()).sum().backward()
    assert sorted(seen) == ["after", "backward", "before", "every"]
    for handle in handles:
        handle.remove()
    assert torch.equal(module(X), wanted) and len(seen) == 4
    module.register_forward_hook(lambda module, args, y: y + 1)
    assert torch.equal(module(X), wanted + 1)


def test_a_forward_on_the_instance_or_in_a_subclass():
    module, wanted = layer(), layer()(X)
    original = module.forward
    module.forward = lambda x: original(x) * 2
    assert torch.equal(module(X), wanted * 2)
    del module.forward
    assert torch.equal(module(X), wanted)

    class Twice(QuantLinear):
        def forward(self, x):
            return super().forward(x) * 2

    module.__class__ = Twice
    assert torch.equal(module(X), wanted * 2)


def test_copies_do_not_follow_the_original():
    module = layer(0)
    before = module(X)
    copies = [copy.deepcopy(module), copy.copy(module).requires_grad_(False)]
    in_place(module, layer(1))
    assert torch.equal(copies[0](X), before)
    assert torch.equal(copies[1](X), module(X))  # a shallow copy shares its tensors


def test_torch_func_transforms_after_plain_calls_and_before():
    module, wanted = layer(), layer()(X)
    parameters = dict(module.named_parameters())
    for _ in range(2):
        assert torch.equal(torch.func.functional_call(module, parameters, X), module(X))
        torch.testing.assert_close(torch.vmap(module)(X), wanted, rtol=1e-5, atol=1e-5)
        jacobian = torch.func.jacrev(module)(X[0])
        torch.testing.assert_close(jacobian, module.dequantize(), rtol=1e-4, atol=1e-5)
        tangent = torch.func.vjp(module, X)[1](torch.ones_like(wanted))[0]
        torch.testing.assert_close(tangent, module.dequantize().sum(0).expand_as(X), rtol=1e-4, atol=1e-5)
        assert torch.equal(module(X), wanted)
    changed = parameters | {"bias": torch.zeros(33)}
    torch.testing.assert_close(
        torch.func.functional_call(module, changed, X), wanted - module.bias, rtol=1e-5, atol=1e-5
    )


def test_other_threads_see_the_layer_as_it_is():
    module, wanted = layer(0), [layer(0)(X), layer(1)(X)]

    @torch.no_grad()
    def calls(_: int) -> list[torch.Tensor]:
        return [module(X) for _ in range(20)]

    for expected in wanted:
        with ThreadPoolExecutor(4) as pool:
            results = sum(pool.map(calls, range(4)), [])
        assert len(results) == 80 and all(torch.equal(result, expected) for result in results)
        in_place(module, layer(1))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_changes_its_own_layer():
    module = layer(0)
    before = module(X)

    def child() -> list[torch.Tensor]:
        torch.set_num_threads(1)
        same = module(X)
        in_place(module, layer(1))
        return [same, module(X)]

    assert all(map(torch.equal, in_child(child), (before, layer(1)(X))))
    assert torch.equal(module(X), before)


def test_quantized_back_and_again_between_calls():
    module = layer()
    model = nn.Sequential(module)
    for config in (lowbit.int8_weight_only(), lowbit.int4_weight_only(32), lowbit.float_weight()):
        lowbit.dequantize_(model)
        wanted = model(X)
        lowbit.quantize_(model, config)
        assert model[0] is module and (model(X) - wanted).norm() < 0.25 * wanted.norm()
