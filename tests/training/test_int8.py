# SPDX-License-Identifier: Apache-2.0
"""int8 mixed-precision training: every product bit for bit that of its codes, gradients, and what is refused."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import lowbit
from lowbit.training import Int8MixedPrecisionLinear, Int8MixedPrecisionTrainingConfig
from lowbit.training.int8_product import int8_product

SHAPES = [(1, 1, 1), (1, 65, 33), (7, 16, 100), (33, 17, 63), (64, 64, 64), (130, 70, 515)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SWITCHES = list(itertools.product([True, False], repeat=3))
FLOAT = Int8MixedPrecisionTrainingConfig(False, False, False)


def codes_of_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """As kernels of `linear` round x: (codes, scale [rows, 1])."""
    scale = x.float().abs().amax(1, True) / 127
    return (x.float() * (1 / scale)).round(), scale


def codes_of_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """As a weight is packed: the scale that clips neither the smallest at -128 nor the largest at 127."""
    low, high = weight.float().amin(1, True).clamp(max=0), weight.float().amax(1, True).clamp(min=0)
    scale = torch.maximum(-low / 128, high / 127)
    return (weight.float() / scale + 128).clamp(0, 255).round() - 128, scale


def emulated(a: Tensor, b: Tensor) -> Tensor:
    """a @ b.T of codes, summed exactly in integers and scaled in the order of the kernels."""
    (x, x_scale), (weight, weight_scale) = codes_of_rows(a), codes_of_weight(b)
    return ((x.long() @ weight.long().T).float() * x_scale * weight_scale.T).to(a.dtype)


def prepared(model: nn.Module, *switches: bool, **options: Any) -> nn.Module:
    made = copy.deepcopy(model)
    lowbit.quantize_(made, Int8MixedPrecisionTrainingConfig(*switches), **options)
    return made


def products_of(layer: nn.Module, x: Tensor, grad: Tensor, autocast: bool = False) -> tuple[Tensor, ...]:
    """y, and the gradients of x, weight and bias, where there is one."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    with torch.autocast("cpu", enabled=autocast):
        y = layer(x)
    y.backward(grad.to(y.dtype))
    return y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())


@pytest.mark.parametrize("m, n, k", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_is_that_of_its_codes_bit_for_bit(dtype: torch.dtype, m: int, n: int, k: int) -> None:
    a, b = torch.randn(m, k).to(dtype), (torch.randn(n, k) + 0.3).to(dtype)
    for y in (int8_product(a, b), int8_product(a.T.contiguous().T, b.T.contiguous().T)):
        assert y.dtype is dtype and y.is_contiguous() and torch.equal(y, emulated(a, b))


@pytest.mark.parametrize("m, n, k", [*SHAPES, (16, 3, 140_000)])  # the last is more than an int32 sums
def test_a_product_is_within_the_roundings_of_its_two_operands(m: int, n: int, k: int) -> None:
    """An element is off by half a step of its row, and a sum by one rounding of int32 and two of its scales."""
    a, b = torch.randn(m, k) * torch.logspace(-30, 30, m).unsqueeze(1), torch.randn(n, k) * 1e-5
    error = (int8_product(a, b).double() - a.double() @ b.double().T).abs()
    half_a, half_b = (x.abs().amax(1, True).double() / 254 for x in (a, b))
    rounding = half_a * b.abs().sum(1).double() + a.abs().sum(1, True).double() * half_b.T + k * half_a * half_b.T
    assert (error <= rounding * 1.0001 + 1e-6 * a.abs().double() @ b.abs().double().T).all()


@pytest.mark.parametrize("m, n", [(3, 5), (5, 3)])
def test_the_op_is_what_torch_was_told(m: int, n: int) -> None:
    torch.library.opcheck(int8_product, (torch.randn(m, 20), torch.randn(20, n).T))


def test_codes_that_are_exact_give_the_exact_product() -> None:
    a, b = (torch.randint(-127, 128, (rows, 512)).float() for rows in (40, 24))
    a[:, 0], b[:, 0] = 127, 127
    assert torch.equal(int8_product(a, b), (a.double() @ b.double().T).float())
    assert torch.equal(int8_product(b * 2.0**-20, a * 2.0**9), (b.double() @ a.double().T).float() * 2.0**-11)


@pytest.mark.parametrize("a_rows, b_rows", [(5, 3), (3, 5)])
def test_what_is_not_finite_makes_its_row_or_column_nan(a_rows: int, b_rows: int) -> None:
    a, b = torch.randn(a_rows, 20), torch.randn(b_rows, 20)
    clean = int8_product(a, b)
    a[1, 3], b[2, 0] = torch.inf, torch.nan
    y = int8_product(a, b)
    expected = clean.clone()
    expected[1], expected[:, 2] = torch.nan, torch.nan
    assert torch.allclose(y, expected, rtol=0, atol=0, equal_nan=True)


def test_extreme_finite_values_and_zeros() -> None:
    a = torch.tensor([[3e34, -1e34], [1e-35, 2e-35], [0.0, 0.0], [1e-38, 0.0]])
    y = int8_product(a, torch.tensor([[0.5, 0.25]]))
    assert y.isfinite().all() and not y[2:].any()  # a scale that would be subnormal is 0
    torch.testing.assert_close(y[:2], a[:2] @ torch.tensor([[0.5], [0.25]]), rtol=0.02, atol=0)


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_each_switch_makes_its_product_int8(switches: tuple[bool, ...], dtype: torch.dtype, bias: bool) -> None:
    layer = nn.Linear(100, 33, bias=bias).to(dtype)
    x, grad = torch.randn(2, 9, 100).to(dtype), torch.randn(2, 9, 33).to(dtype)
    of_float = products_of(layer, x, grad)
    of_int8 = products_of(prepared(nn.Sequential(layer), *switches)[0], x, grad)
    rows, grads, weight = x.view(18, 100), grad.view(18, 33), layer.weight.detach()
    output = emulated(rows, weight) + layer.bias.detach() if bias else emulated(rows, weight)
    expected = output, emulated(grads, weight.T), emulated(grads.T, rows.T)
    for wanted, int8, flat, plain in zip(switches, of_int8, expected, of_float, strict=False):
        assert int8.dtype is dtype and int8.shape == plain.shape
        if wanted:
            assert torch.equal(int8, flat.view(plain.shape)) and not torch.equal(int8, plain)
        else:
            torch.testing.assert_close(int8, plain)
    assert len(of_int8) == 3 + bias and torch.equal(of_int8[-1], of_float[-1]) >= bias


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_autocast_gives_activations_its_dtype_and_weights_keep_theirs(switches: tuple[bool, ...]) -> None:
    layer = nn.Linear(100, 33)
    x, grad = torch.randn(18, 100), torch.randn(18, 33)
    trained = prepared(nn.Sequential(layer), *switches)[0]
    of_float, of_int8 = products_of(layer, x, grad, autocast=True), products_of(trained, x, grad, autocast=True)
    assert all(int8.dtype is plain.dtype for int8, plain in zip(of_int8, of_float, strict=True))
    rows, grads = x.bfloat16(), grad.bfloat16()
    expected = (
        emulated(rows.float(), layer.weight.detach()).bfloat16() + layer.bias.detach(),
        emulated(grads.float(), layer.weight.detach().T).bfloat16().float(),
        emulated(grads.float().T, rows.float().T),
    )
    for wanted, int8, emulation, plain in zip(switches, of_int8, expected, of_float, strict=False):
        if wanted:
            assert torch.equal(int8, emulation.to(int8.dtype))
        else:
            torch.testing.assert_close(int8, plain, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("switches", SWITCHES[:-1], ids=str)
def test_a_model_learns_as_in_float(
    model: nn.Module, train: Callable[..., list[Tensor]], switches: tuple[bool, ...], dtype: torch.dtype
) -> None:
    model = model.to(dtype)
    trained = prepared(model, *switches)
    float_losses, losses = train(model, 60), train(trained, 60)
    fell = float_losses[0] - torch.stack(float_losses[-10:]).mean()
    assert fell > 0.1 and losses[0] - torch.stack(losses[-10:]).mean() > 0.9 * fell


def test_layers_keep_their_objects_parameters_and_state_dict(model: nn.Module) -> None:
    before, state = list(model.modules()), copy.deepcopy(model.state_dict())
    parameters = dict(model.named_parameters())
    report = lowbit.quantize_(model, Int8MixedPrecisionTrainingConfig(grad_weight=False))
    assert [row.format for row in report.rows] == ["int8 products"] * 3
    assert report.model_bytes_before == report.model_bytes_after
    assert report.config == "Int8MixedPrecisionTrainingConfig(grad_weight=False)"
    assert repr(model[0]) == (
        "Int8MixedPrecisionLinear(in_features=100, out_features=33, bias=True, int8 output, grad_input)"
    )
    assert all(now is then for now, then in zip(model.modules(), before, strict=True))
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    model.load_state_dict(state)
    twin = copy.deepcopy(model)
    x = torch.randn(3, 100)
    assert torch.equal(twin(x), model(x))
    lowbit.quantize_(model, FLOAT, lambda module, name: name != "4")
    assert [type(model[i]) for i in (0, 2, 4)] == [nn.Linear, nn.Linear, Int8MixedPrecisionLinear]
    report = lowbit.quantize_(model, FLOAT)
    assert [row.note for row in report.rows] == ["float again"] and model[4].__dict__.keys() == model[0].__dict__.keys()
    assert lowbit.quantize_(model, FLOAT).notes == ["no layer was selected"]
    lowbit.quantize_(model, lowbit.int8_weight_only())


def test_a_weight_that_changes_between_calls_is_rounded_anew(model: nn.Module) -> None:
    layer, x = prepared(model)[0], torch.randn(40, 100)
    layer(x)
    for value in (layer.weight.detach() * 3 + 1, torch.randn(33, 100)):
        with torch.no_grad():
            layer.weight.copy_(value)
        assert torch.equal(layer(x).detach(), emulated(x, value) + layer.bias.detach())


def test_checkpointing_and_compiled_graphs_give_the_same(model: nn.Module) -> None:
    model = prepared(model)
    x = torch.randn(2, 9, 100)

    def gradients(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        inputs = x.clone().requires_grad_()
        model.zero_grad()
        call(inputs).square().sum().backward()
        return [inputs.grad, *(parameter.grad.clone() for parameter in model.parameters())]

    eager = gradients(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for call in (lambda x: checkpoint(model, x, use_reentrant=False), compiled):
        assert all(torch.equal(*pair) for pair in zip(eager, gradients(call), strict=True))


def test_an_empty_batch_a_single_row_and_frozen_parts(model: nn.Module) -> None:
    layer = prepared(model)[0]
    y, grad_x, grad_weight, _ = products_of(layer, torch.zeros(0, 100), torch.zeros(0, 33))
    assert y.shape == (0, 33) and grad_x.shape == (0, 100) and not grad_weight.any()
    x = torch.randn(100)
    assert layer(x).shape == (33,) and torch.equal(layer(x), layer(x.unsqueeze(0))[0])
    layer.weight.requires_grad_(False)
    layer.weight.grad = None
    products_of(layer, x, torch.randn(33))
    assert layer.weight.grad is None
    assert layer(x).requires_grad and not layer.requires_grad_(False)(x).requires_grad


def test_a_tied_weight_stays_one(model: nn.Module) -> None:
    table = nn.Embedding(33, 100)
    model = nn.Sequential(table, nn.Linear(100, 33, bias=False))
    model[1].weight = table.weight
    trained = prepared(model)
    assert trained[1].weight is trained[0].weight and type(trained[1]) is Int8MixedPrecisionLinear
    trained(torch.arange(33)).square().sum().backward()
    assert trained[0].weight.grad.any()


def test_conv1d_of_transformers() -> None:
    conv = pytest.importorskip("transformers.pytorch_utils").Conv1D(33, 100)
    trained, x = prepared(nn.Sequential(conv))[0], torch.randn(40, 100)
    assert torch.equal(trained(x).detach(), emulated(x, conv.weight.detach().T) + conv.bias.detach())
    _, _, grad, _ = products_of(trained, x, torch.ones(40, 33))
    assert torch.equal(grad, emulated(torch.ones(33, 40), x.T).T)
    model = nn.Sequential(trained)
    lowbit.quantize_(model, FLOAT)
    assert type(model[0]) is type(conv) and functional.mse_loss(model[0](x), conv(x)) == 0


@pytest.mark.parametrize("name", ["output", "grad_input", "grad_weight"])
@pytest.mark.parametrize("value", [1, None, "int8"])
def test_a_switch_that_is_no_bool_is_refused(name: str, value: Any) -> None:
    with pytest.raises(
        TypeError, match=f"Int8MixedPrecisionTrainingConfig: {name} must be True or False, got {value!r}"
    ):
        Int8MixedPrecisionTrainingConfig(**{name: value})


def test_what_cannot_be_trained_is_refused_before_anything_changes(model: nn.Module, subtests: pytest.Subtests) -> None:
    config = Int8MixedPrecisionTrainingConfig()
    for options, text in [
        ({"head": lowbit.int8_weight_only()}, r"head must be left out with .*Config\(\), got int8_weight_only"),
        ({"device": "cpu"}, r"device must be None with Int8MixedPrecisionTrainingConfig\(\), got a str"),
        ({"calibration": []}, "calibration must be None"),
    ]:
        with subtests.test(text), pytest.raises(ValueError, match=text):
            lowbit.quantize_(model, config, **options)
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken[4].weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="weight of 4 must be finite"):
        lowbit.quantize_(broken, config)
    with pytest.raises(TypeError, match="weight of 2 must be float32, bfloat16 or float16, got torch.float64"):
        broken[2].double()
        lowbit.quantize_(broken, config)
    with pytest.raises(TypeError, match="filter_fn must select nn.Linear and experts layers only, got 1: GELU"):
        lowbit.quantize_(model, config, lambda module, name: name in ("0", "1"))
    assert [type(layer[0]) for layer in (model, broken)] == [nn.Linear] * 2
    with pytest.raises(TypeError, match=r"Int8MixedPrecisionLinear: quantize_\(model, Int8MixedPrecisionTrain"):
        Int8MixedPrecisionLinear(4, 4)


@pytest.mark.parametrize("again", [Int8MixedPrecisionTrainingConfig(), lowbit.int8_weight_only()], ids=str)
def test_a_layer_that_is_trained_is_not_taken_again(model: nn.Module, again: Any) -> None:
    model = prepared(model)
    with pytest.raises(
        ValueError,
        match="0 is being trained as int8 products; .*or end it with .*Config.False, False, False.",
    ):
        lowbit.quantize_(model, again)
    assert type(model[0]) is Int8MixedPrecisionLinear
    lowbit.quantize_(model, FLOAT)
    lowbit.quantize_(model, again)
    assert type(model[0]) is not nn.Linear


def test_inputs_of_another_dtype_or_length_are_refused_by_name(model: nn.Module) -> None:
    layer = prepared(model)[0]
    with pytest.raises(TypeError, match="x must be torch.float32, as weight is, got torch.bfloat16"):
        layer(torch.randn(3, 100).bfloat16())
    with pytest.raises(ValueError, match=r"x must be \[..., 100\], got \[3, 99\]"):
        layer(torch.randn(3, 99))
