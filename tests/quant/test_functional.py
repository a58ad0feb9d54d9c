# SPDX-License-Identifier: Apache-2.0
"""`linear`, `gather_linear` and `experts` take names: they are against float64, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import lowbit
from lowbit import _C
from lowbit.formats import LinearSpec
from lowbit.formats.spec import StoredWeight
from lowbit.testing import rows

N, K, M = 40, 70, 5
ACTIVATIONS = {
    "none": lambda y: y,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda y: functional.gelu(y, approximate="tanh"),
    "silu": functional.silu,
}


def packed(n: int = N, k: int = K, config=None, seed: int = 0) -> lowbit.QuantLinear:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(k, n))
    lowbit.quantize_(model, config or lowbit.int4_weight_only(32))
    return model[0]


def decoded(layer: lowbit.QuantLinear) -> torch.Tensor:
    return layer.dequantize().double()


@pytest.fixture
def layer() -> lowbit.QuantLinear:
    return packed()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(M, K, generator=torch.Generator().manual_seed(1))


def test_every_activation_has_its_name(layer, x) -> None:
    assert list(ACTIVATIONS) == list(_C.ACTIVATIONS)
    mul, add = torch.randn(M, N), torch.randn(M, N)
    product = functional.linear(x.double(), decoded(layer), layer.bias.double())
    for name, function in ACTIVATIONS.items():
        y = lowbit.linear(x, layer.weight, layer.stored, layer.bias, activation=name, mul=mul, add=add)
        torch.testing.assert_close(y.double(), function(product) * mul + add, rtol=1e-5, atol=1e-4)


def test_a_kernel_is_taken_by_its_name(layer, x) -> None:
    call = (M, *layer.op_args, "float32")
    fits = [row["name"] for row in _C.explain_linear(*call) if row["chosen"] or row["reason"] == "a better row fits"]
    assert len(fits) > 1
    for name in fits:
        y = lowbit.linear(x, layer.weight, layer.stored, layer.bias, kernel=name)
        assert _C.last_kernel("linear") == name
        torch.testing.assert_close(y, layer(x), rtol=1e-5, atol=1e-5)
    lowbit.linear(x, layer.weight, layer.stored, layer.bias)
    assert _C.last_kernel("linear") == fits[0]


def test_a_kernel_that_does_not_fit_gives_way(layer, x) -> None:
    other = next(str(row["name"]) for row in rows("linear") if "int8_semi_sparse" in str(row["name"]))
    y = lowbit.linear(x, layer.weight, layer.stored, layer.bias, kernel=other)
    assert _C.last_kernel("linear") != other and torch.equal(y, layer(x))


def test_gradients_are_those_of_the_decoded_weight(layer, x) -> None:
    x.requires_grad_()
    grad = torch.randn(M, N)
    lowbit.linear(x, layer.weight, layer.stored, layer.bias, activation="silu").backward(grad)
    exact = x.detach().double().requires_grad_()
    functional.silu(functional.linear(exact, decoded(layer), layer.bias.double())).backward(grad.double())
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)


def test_names_are_read_inside_of_one_graph(layer, x) -> None:
    kernel = next(row["name"] for row in _C.explain_linear(M, *layer.op_args, "float32") if row["reason"] == "a better row fits")
    stored = layer.stored
    run = lambda x: lowbit.linear(x, layer.weight, stored, layer.bias, activation="gelu", kernel=kernel)  # noqa: E731
    with torch.no_grad():
        y = torch.compile(run, fullgraph=True, backend="aot_eager")(x)
        assert _C.last_kernel("linear") == kernel and torch.equal(y, run(x))


def test_rows_by_index_are_products_of_their_weights() -> None:
    layers = [packed(seed=e) for e in range(3)]
    weight, bias = torch.stack([one.weight for one in layers]), torch.stack([one.bias for one in layers])
    x, index = torch.randn(M, K), torch.randint(3, (M, 2))
    y = lowbit.gather_linear(x, weight, index, layers[0].stored, bias)
    every = torch.stack([functional.linear(x.double(), decoded(one), one.bias.double()) for one in layers], 1)
    torch.testing.assert_close(y.double(), every.gather(1, index[..., None].expand(-1, -1, N)), rtol=1e-5, atol=1e-5)


def test_experts_are_two_products_of_packed_weights() -> None:
    inner, count = 48, 3
    gates, downs = [packed(2 * inner, K, seed=e) for e in range(count)], [packed(K, inner, seed=9 + e) for e in range(count)]
    gate_up, down = (torch.stack([one.weight for one in of]) for of in (gates, downs))
    x, index, weights = torch.randn(M, K), torch.randint(count, (M, 2)), torch.rand(M, 2)
    y = lowbit.experts(x, gate_up, down, index, weights, gates[0].stored, downs[0].stored, "gelu", gated=True)
    wanted = torch.zeros(M, K, dtype=torch.float64)
    for t in range(M):
        for j in range(2):
            gate, up = (decoded(gates[index[t, j]]) @ x[t].double()).chunk(2)
            wanted[t] += weights[t, j] * (decoded(downs[index[t, j]]) @ (functional.gelu(gate) * up))
    torch.testing.assert_close(y.double(), wanted, rtol=1e-4, atol=1e-4)


def test_a_layer_says_how_its_weight_is_stored(layer) -> None:
    assert layer.stored == StoredWeight.read(layer.layout.tolist()) or layer.stored.is_as(StoredWeight.read(layer.layout.tolist()))
    assert layer.stored.shape == tuple(layer.weight.shape) and (layer.stored.n, layer.stored.k) == (N, K)


def test_what_is_no_name_is_refused(layer, x) -> None:
    call = x, layer.weight, layer.stored, layer.bias
    with pytest.raises(ValueError, match="linear: activation must be one of none, relu, gelu, gelu_tanh, silu, got 'tanh'"):
        lowbit.linear(*call, activation="tanh")
    with pytest.raises(ValueError, match="linear: activation must be one of none, .*, got 4"):
        lowbit.linear(*call, activation=4)
    with pytest.raises(ValueError, match="linear has no row 'linear_abacus', wanted one of linear_"):
        lowbit.linear(*call, kernel="linear_abacus")
    with pytest.raises(TypeError, match=r"^linear: stored must be a StoredWeight, as QuantLinear.stored, got tuple$"):
        lowbit.linear(x, layer.weight, layer.op_args)
    with pytest.raises(TypeError, match=r"^experts: down_stored must be a StoredWeight"):
        lowbit.experts(x, layer.weight[None], layer.weight[None], torch.zeros(M, 1).long(), torch.ones(M, 1), layer.stored, layer.spec)
    with pytest.raises(ValueError, match="gather_linear: stored must be in layout x86-panel-16x64, .* row-major"):
        lowbit.gather_linear(x, layer.weight[None], torch.zeros(M, 1).long(), layer.stored.in_layout("row-major"))


def test_another_width_of_x_is_an_error_also_within_the_padding(layer) -> None:
    assert StoredWeight(LinearSpec("int4", 32), N, 96, _C.LAYOUT).shape == layer.stored.shape  # 70 is padded as 96 is
    with pytest.raises(RuntimeError, match="70"):
        lowbit.linear(torch.randn(M, 96), layer.weight, layer.stored)
