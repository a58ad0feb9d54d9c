# SPDX-License-Identifier: Apache-2.0
"""What nn.Linear takes besides dense tensors of floats: a packed layer computes it too, or says what it is given."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import lowbit

LAYOUTS = [torch.jagged, torch.strided]
X = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def layer() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32))
    lowbit.quantize_(model, lowbit.int8_weight_only())
    return model[0]


def nested(layout: torch.layout, *sizes: tuple[int, ...], **options: bool) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    with warnings.catch_warnings(action="ignore"):
        parts = [torch.randn(size, generator=generator) for size in sizes]
        return torch.nested.nested_tensor(parts, layout=layout, **options)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_nested_tensor_is_multiplied_and_has_its_gradient(layer: nn.Module, layout: torch.layout, grad: bool) -> None:
    x = nested(layout, (3, 64), (5, 64), requires_grad=grad)
    wanted = nested(layout, (3, 64), (5, 64), requires_grad=grad)
    with torch.set_grad_enabled(grad):
        y, linear = layer(x), layer.to_linear()(wanted)
    assert y.is_nested and y.layout is layout
    for ours, theirs in zip(y.unbind(), linear.unbind(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    if grad:
        for result in (y, linear):
            torch.stack([part.square().sum() for part in result.unbind()]).sum().backward()
        for ours, theirs in zip(x.grad.unbind(), wanted.grad.unbind(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_jagged_result_adds_to_its_input_and_goes_through_a_compiler() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    lowbit.quantize_(model, lowbit.int8_dynamic_activation_int4_weight(32))
    x = nested(torch.jagged, (3, 64), (5, 64))
    with torch.no_grad():
        wanted = (x + model(x)).values()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close((x + compiled(x)).values(), wanted)
    torch.compiler.reset()


def test_a_nested_tensor_of_other_features_is_refused(layer: nn.Module) -> None:
    for layout in LAYOUTS:
        with pytest.raises(RuntimeError, match="must be k=64"):
            layer(nested(layout, (3, 65), (5, 65)))
    with pytest.raises(ValueError, match="the last dimension of x must be in_features, got the ragged one of 3"):
        layer(nested(torch.jagged, (3, 64), (5, 64)).transpose(1, 2))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_a_trace_with_gradients_computes_and_differentiates_as_the_layer(bias: bool, grad: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 32, bias=bias), nn.ReLU(), nn.Linear(32, 9, bias=bias))
    lowbit.quantize_(model, lowbit.int8_weight_only())
    with warnings.catch_warnings(action="error", category=torch.jit.TracerWarning):
        traced = torch.jit.trace(model, X.clone().requires_grad_(grad))
    assert str(traced.inlined_graph).count("lowbit::linear") == 2
    ours, theirs = (torch.randn(5, 64, generator=torch.Generator().manual_seed(2)).requires_grad_() for _ in range(2))
    y, wanted = traced(ours), model(theirs)
    assert torch.equal(y, wanted)
    y.sum().backward(), wanted.sum().backward()
    assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_a_meta_tensor_has_a_shape_wherever_the_layer_is(bias: bool, grad: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 32, bias=bias))
    lowbit.quantize_(model, lowbit.int8_weight_only())
    for layer in (model, model.to("meta")):
        x = torch.empty(2, 3, 64, device="meta", requires_grad=grad)
        y = layer(x)
        assert y.is_meta and y.shape == (2, 3, 32)
        if grad:
            y.sum().backward()
            assert x.grad.shape == x.shape


@pytest.mark.parametrize("x", [[[1.0] * 64], np.ones((3, 64), np.float32), 1.0, None], ids=lambda x: type(x).__name__)
def test_what_is_no_tensor_raises_the_error_of_torch(layer: nn.Module, x: object) -> None:
    with pytest.raises(TypeError) as theirs:
        nn.Linear(64, 32)(x)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled), pytest.raises(TypeError) as ours:
            layer(x)
        assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("x", "text"),
    [(X.to(torch.complex64), "float32, bfloat16 or float16, got complex64"), (X.bool(), "got bool"), (X.double(), "got float64"),
     (X.to_sparse(), r"a dense tensor, got sparse_coo; x.to_dense\(\)"), (X.to_sparse_csr(), "a dense tensor, got sparse_csr"),
     (torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), "got qint8")],
    ids=["complex", "bool", "float64", "coo", "csr", "qint8"],
)  # fmt: skip
def test_other_tensors_are_refused_by_what_they_are(layer: nn.Module, x: Tensor, text: str, grad: bool) -> None:
    with torch.set_grad_enabled(grad), pytest.raises(TypeError, match=f"linear: x must be .*{text}"):
        layer(x)


@pytest.mark.parametrize(
    "pruned",
    [lambda m: prune.l1_unstructured(m, "weight", 0.5), lambda m: prune.random_unstructured(m, "weight", 0.5),
     lambda m: prune.ln_structured(m, "weight", 0.5, 2, 0), lambda m: prune.identity(m, "weight"),
     lambda m: prune.global_unstructured([(m, "weight")], prune.L1Unstructured, amount=0.5)],
    ids=["l1", "random", "ln", "identity", "global"],
)  # fmt: skip
def test_pruning_is_refused_and_leaves_the_layer_as_it_was(layer: nn.Module, pruned: object) -> None:
    wanted, names = layer(X), [*layer.state_dict()]
    with pytest.raises(ValueError, match=r"torch.nn.utils.prune: the layer must be float, got weight of QuantLinear\(in_features=64"):
        pruned(layer)
    assert torch.equal(layer(X), wanted) and [*layer.state_dict()] == names and not layer._forward_pre_hooks


def test_what_was_pruned_before_keeps_its_zeros() -> None:
    model = nn.Sequential(nn.Linear(64, 32))
    prune.l1_unstructured(model[0], "weight", 0.5)
    prune.remove(model[0], "weight")
    zeros = model[0].weight == 0
    for config in (lowbit.int8_weight_only(), lowbit.int4_weight_only(32)):
        copy = nn.Sequential(nn.Linear(64, 32))
        copy.load_state_dict(model.state_dict())
        lowbit.quantize_(copy, config)
        assert (copy[0].dequantize()[zeros] == 0).all()


def test_a_layer_that_is_asked_for_gradients_names_itself_and_the_ways_to_train(layer: nn.Module) -> None:
    with pytest.raises(ValueError) as error:
        layer.requires_grad_(True)
    for text in ("QuantLinear(in_features=64, out_features=32", "peft", "QATConfig", "lowbit.dequantize_"):
        assert text in str(error.value)
    assert layer.requires_grad_(False) is layer and not layer.bias.requires_grad
    assert nn.Sequential(layer).requires_grad_(False)[0] is layer


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_sums_beyond_the_largest_float_are_no_number_and_all_below_are_right(config: object, rows: int) -> None:
    """docs/ops/linear.md: products of codes are scaled at their end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32, bias=False))
    lowbit.quantize_(model, config)
    signs = torch.randn(rows, 64).sign()
    for size in (1e30, 1e34, 1e36, 3e38):
        x = size * signs
        y, wanted = model(x).double(), x.double() @ model[0].dequantize().double().T
        finite = y.isfinite()
        assert finite.all() or size > 1e34
        assert ((y - wanted).abs()[finite] <= 0.01 * size).all()
