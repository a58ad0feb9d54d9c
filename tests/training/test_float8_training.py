# SPDX-License-Identifier: Apache-2.0
"""convert_to_float8_training: products against float64 sums of float8 products, torch._scaled_mm and torchao; layers in
models; what is refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowbit
from lowbit import testing
from lowbit.training import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    Float8LinearRecipeName,
    QATConfig,
    ScalingGranularity,
    ScalingType,
    convert_to_float8_training,
    end_float8_training,
    float8_product,
)
from lowbit.training.float8_product import float8_scale, multiply, operand, scaled_mm

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPES = [name.value for name in Float8LinearRecipeName]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
TENSORWISE, AXISWISE = ScalingGranularity


@pytest.fixture(params=RECIPES)
def config(request: pytest.FixtureRequest) -> Float8LinearConfig:
    return Float8LinearConfig.from_recipe_name(request.param)


@pytest.fixture(params=[False, True], ids=["float32 products", "bfloat16 products"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kinds of CPUs."""
    monkeypatch.setattr(float8_product, "BFLOAT16_PRODUCTS", request.param)


def codes_of(x: Tensor, cast: CastConfig, dim: int, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """The definition, in float64: float8 numbers and their scale."""
    if not cast.is_cast:
        return x.double(), torch.ones((), dtype=torch.float64)
    axis = dim if cast.scaling_granularity is AXISWISE else (0, 1)
    scale = (torch.finfo(cast.target_dtype).max / x.double().abs().amax(axis, True).clamp(min=1e-12)).float()
    if power_of_2:
        scale = 2 ** scale.double().log2().floor()
    return (x.float() * scale.float()).to(cast.target_dtype).double(), scale.double()


def exact(a: Tensor, a_cast: CastConfig, b: Tensor, b_cast: CastConfig, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """The product of a [m, k] and b [k, n], and that of magnitudes."""
    (a, a_scale), (b, b_scale) = codes_of(a, a_cast, 1, power_of_2), codes_of(b, b_cast, 0, power_of_2)
    return a @ b / a_scale / b_scale, a.abs() @ b.abs() / a_scale / b_scale


def budget(size: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """Sums in float32; in the dtype of the result one rounding of the sum, of the scaled one, and of bias."""
    return ((k + 8) * testing.ROUNDOFF["float32"] + 3 * testing.ROUNDOFF[str(dtype)[6:]]) * size + 1e-7 * (
        dtype is torch.float16
    )


def converted(layer: nn.Linear, config: Float8LinearConfig) -> Float8Linear:
    return convert_to_float8_training(copy.deepcopy(layer), config=config)


def gradients(layer: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """y and the gradients of x, weight and bias."""
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(grad)
    return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad]


@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 100, 33), (17, 48, 65), (3, 257, 16)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.usefixtures("products")
def test_products_are_the_sums_of_float8_products(
    config: Float8LinearConfig, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    m, k, n = shape
    layer = converted(nn.Linear(k, n).to(dtype), config)
    x, grad = torch.randn(m, k).to(dtype) * 3, torch.randn(m, n).to(dtype) / 50
    y, grad_x, grad_weight, grad_bias = gradients(layer, x, grad)
    weight, bias, power_of_2 = layer.weight.detach(), layer.bias.detach(), config.round_scales_to_power_of_2
    c = config
    for what, got, depth, operands, added in (
        ("output", y, k, (x, c.cast_config_input, weight.T, c.cast_config_weight), bias.double()),
        ("grad_input", grad_x, n, (grad, c.cast_config_grad_output, weight, c.cast_config_weight_for_grad_input), 0),
        ("grad_weight", grad_weight, m, (grad.T, c.cast_config_grad_output_for_grad_weight,
                                         x, c.cast_config_input_for_grad_weight), 0),
    ):  # fmt: skip
        wanted, size = exact(*operands, power_of_2)
        size = size + (bias.double().abs() if isinstance(added, Tensor) else 0)
        assert got.dtype == dtype
        testing.assert_within(got, wanted + added, budget(size, depth, dtype), what=what)
    assert torch.equal(grad_bias, grad.sum(0))


@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("granularity", ScalingGranularity)
@pytest.mark.parametrize("target", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_codes_are_those_of_torchs_cast(
    dtype: torch.dtype,
    target: torch.dtype,
    granularity: ScalingGranularity,
    dim: int,
    power_of_2: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit, ties and subnormal numbers included: every number of 16 bits, in rows of all sizes. (Those that
    round up to 2**128 become inf.)"""
    cast = CastConfig(scaling_granularity=granularity, target_dtype=target)
    kind = torch.float16 if dtype is torch.float16 else torch.bfloat16
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(kind).to(dtype)
    x = torch.where(x.float().abs() <= 1.9 * 2.0**126, x, 0).view(256, 256)
    x = x if dim else x.T.contiguous()
    made = operand(x, cast, dim, power_of_2, torch.float32, emulate=True)
    codes, scale = codes_of(x, cast, dim, power_of_2)
    assert made.values.dtype is torch.float32 and (made.divisor is None) is power_of_2
    values = made.values.double() if made.divisor is None else made.values.double() / made.divisor.double()
    testing.assert_within(values, codes / scale, (codes / scale).abs() * 1e-15, what="codes")
    assert torch.equal(float8_scale(x, cast, dim, power_of_2).double(), scale)
    assert torch.equal(made.values, made.values.bfloat16().float())  # exact in bfloat16 too


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 33, 20), (16, 48, 32)], ids=str)
@pytest.mark.parametrize("targets", [(E4M3, E4M3), (E5M2, E4M3)], ids=str)
@pytest.mark.parametrize("granularity", ScalingGranularity)
def test_the_product_of_a_gpu_is_that_of_a_cpu(
    granularity: ScalingGranularity, targets: tuple[torch.dtype, torch.dtype], shape: tuple[int, int, int]
) -> None:
    """torch._scaled_mm is on CPUs too: codes as CUDA gets them, padded to multiples of 16."""
    m, k, n = shape
    a, b = torch.randn(m, k), torch.randn(k, n)
    casts = [CastConfig(scaling_granularity=granularity, target_dtype=target) for target in targets]
    scales = float8_scale(a, casts[0], 1, False), float8_scale(b, casts[1], 0, False)
    codes = [(x * scale).to(target) for x, scale, target in zip((a, b), scales, targets, strict=True)]
    wanted, size = exact(a, casts[0], b, casts[1], False)
    pair = [float8_product.Operand(*parts) for parts in zip(codes, scales, strict=True)]
    operands = [operand(x, casts[i], 1 - i, False, torch.float32, True) for i, x in enumerate((a, b))]
    for what, got in (
        ("scaled_mm", multiply(*pair, torch.float32)),
        ("emulated", multiply(*operands, torch.float32)),
    ):
        testing.assert_within(got, wanted, budget(size, k, torch.float32), what=what)
    assert scaled_mm(*codes, fast_accum=False).shape == (m, n)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_it_is_torchaos_emulation(recipe: str, dtype: torch.dtype) -> None:
    peer = pytest.importorskip("torchao.float8")
    layer = nn.Sequential(nn.Linear(100, 33)).to(dtype)
    theirs = peer.convert_to_float8_training(
        copy.deepcopy(layer), config=replace(peer.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    )
    convert_to_float8_training(layer, config=Float8LinearConfig.from_recipe_name(recipe))
    x, grad = torch.randn(9, 100).to(dtype), torch.randn(9, 33).to(dtype)
    allowed = 5e-6 if dtype is torch.float32 else 3 * testing.ROUNDOFF[str(dtype)[6:]]
    for ours, other in zip(gradients(layer[0], x, grad), gradients(theirs[0], x, grad), strict=True):
        # They divide codes by the scale before they multiply, which is exact for powers of two, in float32.
        if recipe == "tensorwise" or dtype is torch.bfloat16:
            assert (ours - other).abs().max() <= allowed * other.abs().max()
        else:
            assert torch.equal(ours, other)


def test_a_configuration_of_torchao_is_taken_and_recipes_are_the_same(subtests: pytest.Subtests) -> None:
    peer = pytest.importorskip("torchao.float8")
    for recipe in RECIPES:
        with subtests.test(str(recipe)):
            ours, theirs = (kind.from_recipe_name(recipe) for kind in (Float8LinearConfig, peer.Float8LinearConfig))
            layer = convert_to_float8_training(nn.Linear(4, 4), config=theirs)
            assert layer.config == ours and type(layer.config) is Float8LinearConfig
    assert Float8LinearConfig.from_recipe_name(Float8LinearRecipeName.TENSORWISE) == Float8LinearConfig()


@pytest.mark.parametrize("exponent", [-120, -80, 0, 80, 120])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_range_is_lost(config: Float8LinearConfig, dtype: torch.dtype, exponent: int) -> None:
    """Numbers that are far from 1 on one side and on the other: their products are finite, and nothing between is
    not. A row whose largest number is below 1e-12 keeps torchao's bound of scales: it becomes 0."""
    layer = converted(nn.Linear(64, 16, bias=False).to(dtype), config)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(16, 64) * 2.0**-exponent)
    x = (torch.randn(4, 64) * 2.0**exponent).to(dtype)
    c = config
    wanted, size = exact(x, c.cast_config_input, layer.weight.detach().T, c.cast_config_weight,
                         c.round_scales_to_power_of_2)  # fmt: skip
    y = layer(x).detach()
    testing.assert_within(y, wanted, budget(size, 64, dtype), what="output")
    assert bool(y.any()) is (exponent == 0)


def test_zeros_stay_zeros_and_empty_batches_empty(config: Float8LinearConfig, subtests: pytest.Subtests) -> None:
    layer = converted(nn.Linear(40, 24), config)
    for x in (torch.zeros(3, 40), torch.zeros(0, 40), torch.zeros(2, 0, 40)):
        with subtests.test(shape=tuple(x.shape)):
            y, grad_x, grad_weight, grad_bias = gradients(layer, x, torch.zeros(*x.shape[:-1], 24))
            assert torch.equal(y, layer.bias.expand(y.shape)) and grad_x.shape == x.shape
            assert not any(part.any() for part in (grad_x, grad_weight, grad_bias))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_not_finite_becomes_nan(config: Float8LinearConfig, dtype: torch.dtype, value: float) -> None:
    layer = converted(nn.Linear(40, 24).to(dtype), config)
    x, grad = torch.randn(5, 40).to(dtype), torch.randn(5, 24).to(dtype)
    x[2, 7] = value
    y, _, grad_weight, _ = gradients(layer, x, grad)
    assert y[2].isnan().all() and not grad_weight[:, 7].isfinite().any()
    rows = config.cast_config_input.scaling_granularity is AXISWISE
    assert y[0].isfinite().all() if rows else y.isnan().all()
    grad[1, 3] = value
    _, grad_x, grad_weight, grad_bias = gradients(layer, torch.randn(5, 40).to(dtype), grad)
    assert grad_x[1].isnan().all() and not grad_weight[3].isfinite().any() and not grad_bias[3].isfinite()
    with torch.no_grad():
        layer.weight[4, 4] = value
    y, grad_x, *_ = gradients(layer, torch.randn(5, 40).to(dtype), torch.randn(5, 24).to(dtype))
    assert y[:, 4].isnan().all() and grad_x[:, 4].isnan().all()


def test_a_layer_keeps_its_parameters_names_and_hooks(model: nn.Module, config: Float8LinearConfig) -> None:
    kept, ids = copy.deepcopy(model.state_dict()), [id(parameter) for parameter in model.parameters()]
    called = []
    model[0].register_forward_hook(lambda *_: called.append(1))
    first = model[0]
    assert convert_to_float8_training(model, config=config) is model and model[0] is first
    assert type(model[0]) is type(model[2]) is type(model[4]) is Float8Linear and "float8" not in str(model[1])
    assert [id(parameter) for parameter in model.parameters()] == ids and model.state_dict().keys() == kept.keys()
    model.load_state_dict(kept)
    model(torch.randn(2, 100))
    assert called and "e4m3fn" in repr(model[0])


def test_the_end_of_training_is_the_float_model(model: nn.Module, config: Float8LinearConfig) -> None:
    same, x = copy.deepcopy(model), torch.randn(3, 100)
    convert_to_float8_training(model, config=config)
    with pytest.raises(ValueError, match="quantize_: .*0 .*Float8Linear|quantize_: 0 is being trained as float8"):
        lowbit.quantize_(model, lowbit.int8_weight_only(), lambda module, name: name == "0")
    assert end_float8_training(model) is model and type(model[0]) is nn.Linear and "config" not in vars(model[0])
    assert torch.equal(model(x), same(x))
    with pytest.raises(ValueError, match="must have layers of convert_to_float8_training, got none"):
        end_float8_training(model)
    lowbit.quantize_(model, lowbit.int8_weight_only(), strict=True)


def test_copies_and_files_keep_the_configuration(model: nn.Module, config: Float8LinearConfig) -> None:
    convert_to_float8_training(model, config=config)
    file, x = io.BytesIO(), torch.randn(3, 100)
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert other[0].config == config and torch.equal(other(x), model(x))


def test_it_learns_as_float_does(
    model: nn.Module, train: Callable[..., list[Tensor]], config: Float8LinearConfig
) -> None:
    float_model = copy.deepcopy(model)
    convert_to_float8_training(model, config=config)
    losses = [train(one, 60) for one in (float_model, model)]
    first, last = ([float(torch.stack(loss[part]).mean()) for loss in losses] for part in (slice(10), slice(-10, None)))
    assert last[1] < 0.8 * first[1] and 0 < abs(last[1] - last[0]) < 0.05 * last[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_autocast_products_are_of_its_dtype(config: Float8LinearConfig, dtype: torch.dtype) -> None:
    """The weight is cast to float8 as it is; in float16 nothing is multiplied, as powers of two would not fit."""
    layer = converted(nn.Linear(64, 32), config)
    with torch.no_grad():
        layer.weight *= 2.0**-14
    x = torch.randn(6, 64)
    with torch.autocast("cpu", dtype):
        y = layer(x)
        assert y.dtype == dtype
        y.float().sum().backward()  # inside, where torch would cast too
    assert layer.weight.grad.dtype == torch.float32
    c = config
    wanted, size = exact(x.to(dtype), c.cast_config_input, layer.weight.detach().T, c.cast_config_weight,
                         c.round_scales_to_power_of_2)  # fmt: skip
    bias = layer.bias.detach().double()
    testing.assert_within(y.detach(), wanted + bias, budget(size + bias.abs(), 64, dtype), what="output")


@pytest.mark.parametrize("autocast", [False, True])
def test_it_compiles_without_a_graph_break(config: Float8LinearConfig, autocast: bool) -> None:
    layer = converted(nn.Linear(48, 40), config)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x, dtype = torch.randn(4, 48), torch.bfloat16 if autocast else torch.float32
    grad = torch.randn(4, 40).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        eager = gradients(layer, x, grad)
        x = x.clone().requires_grad_()
        layer.zero_grad()
        y = compiled(x)
    y.backward(grad)
    for graph, wanted in zip((y, x.grad, layer.weight.grad, layer.bias.grad), eager, strict=True):
        torch.testing.assert_close(graph, wanted)


def test_gradient_checkpointing_changes_nothing(model: nn.Module, config: Float8LinearConfig) -> None:
    convert_to_float8_training(model, config=config)
    models, x = [model, copy.deepcopy(model)], torch.randn(5, 100)
    models[0](x).square().sum().backward()
    checkpoint(models[1], x, use_reentrant=False).square().sum().backward()
    for plain, again in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(plain.grad, again.grad)


def test_frozen_parts_get_no_gradient_and_keep_nothing(config: Float8LinearConfig) -> None:
    layer = converted(nn.Linear(48, 40), config)
    x, grad = torch.randn(2, 3, 48), torch.randn(2, 3, 40)
    _, grad_x, grad_weight, _ = gradients(layer, x, grad)
    layer.zero_grad()
    layer(x).backward(grad)
    assert torch.equal(layer.weight.grad, grad_weight)
    layer.requires_grad_(False).weight.grad = None
    y = layer(x.requires_grad_())
    assert [tensor is None for tensor in y.grad_fn.saved_tensors] == [True, False]
    y.backward(grad)
    assert torch.equal(x.grad, grad_x) and layer.weight.grad is None


def test_a_gradient_of_the_gradient_is_refused(config: Float8LinearConfig) -> None:
    layer, x = converted(nn.Linear(48, 40), config), torch.randn(2, 48, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_a_tied_weight_stays_one(config: Float8LinearConfig) -> None:
    table, head = nn.Embedding(30, 48), nn.Linear(48, 30, bias=False)
    head.weight = table.weight
    model = nn.Sequential(table, head)
    convert_to_float8_training(model, config=config)
    assert head.weight is table.weight and len(list(model.parameters())) == 1
    model(torch.arange(6)).square().sum().backward()
    assert table.weight.grad.count_nonzero() > 30 * 48 // 2


def test_on_meta_shapes_and_dtypes_are_known(config: Float8LinearConfig) -> None:
    layer = convert_to_float8_training(nn.Linear(48, 40, device="meta", dtype=torch.bfloat16), config=config)
    y = layer(torch.empty(2, 3, 48, device="meta", dtype=torch.bfloat16, requires_grad=True))
    y.sum().backward()
    assert y.is_meta and y.shape == (2, 3, 40) and y.dtype == torch.bfloat16 and layer.weight.grad.is_meta


def test_a_filter_chooses_layers(model: nn.Module) -> None:
    asked = []

    def choose(module: nn.Module, name: str) -> bool:
        asked.append((type(module), name))
        return name == "2"

    convert_to_float8_training(model, module_filter_fn=choose)
    assert asked == [(nn.Linear, "0"), (nn.Linear, "2"), (nn.Linear, "4")]
    assert [type(model[i]) for i in (0, 2, 4)] == [nn.Linear, Float8Linear, nn.Linear]
    with pytest.raises(ValueError, match="module_filter_fn must select an nn.Linear that can be converted, got none"):
        convert_to_float8_training(model, module_filter_fn=lambda *_: False)


def test_layers_whose_weight_others_read_are_left_and_refused_by_name() -> None:
    attention = nn.MultiheadAttention(32, 4)
    model = nn.Sequential(nn.Linear(32, 32))
    model.add_module("attention", attention)
    convert_to_float8_training(model)
    assert type(model[0]) is Float8Linear and type(attention.out_proj) is not Float8Linear
    with pytest.raises(ValueError, match="out_proj cannot be converted: nn.MultiheadAttention reads its weight"):
        convert_to_float8_training(attention, module_filter_fn=lambda *_: True)
    with pytest.raises(ValueError, match="the model must have an nn.Linear that can be converted, got none"):
        convert_to_float8_training(attention)


def test_the_fused_float_path_of_torchs_encoder_is_off(config: Float8LinearConfig) -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    convert_to_float8_training(layer, config=config)
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        fused = layer(x)
    torch.testing.assert_close(fused, layer(x))


@pytest.mark.parametrize("made", ["Float8Linear", "QuantLinear", "FakeQuantizedLinear"])
def test_another_conversion_is_refused_by_name_and_changes_nothing(model: nn.Module, made: str) -> None:
    last = lambda module, name: name == "4"  # noqa: E731
    if made == "Float8Linear":
        convert_to_float8_training(model, module_filter_fn=last)
    else:
        format = lowbit.int8_weight_only()
        lowbit.quantize_(model, format if made == "QuantLinear" else QATConfig(format), last)
    with pytest.raises(ValueError, match=rf"training: 4 must be an nn.Linear with a float weight, got {made}\("):
        convert_to_float8_training(model)
    assert [type(model[i]).__name__ for i in (0, 2, 4)] == ["Linear", "Linear", made]


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda: Float8Linear(4, 4), TypeError, "convert_to_float8_training.model. makes one"),
        (lambda: Float8LinearConfig.from_recipe_name("row"), ValueError, "recipe_name must be one of .*, got 'row'"),
        (lambda: CastConfig(target_dtype=torch.float8_e4m3fnuz), ValueError, "target_dtype must be torch.float8_e4m3fn"),
        (lambda: CastConfig("dynamic"), TypeError, "scaling_type must be a ScalingType, got 'dynamic'"),
        (lambda: Float8LinearConfig("e4m3"), TypeError, "cast_config_input must be a CastConfig, got str"),
        (lambda: Float8LinearConfig(enable_fsdp_float8_all_gather=True), ValueError, "must be False"),
        (
            lambda: Float8LinearConfig(CastConfig(ScalingType.DISABLED)),
            ValueError,
            "cast_config_input and cast_config_weight must both be DYNAMIC or both be DISABLED, got DISABLED and DYN",
        ),
        (
            lambda: Float8LinearConfig(CastConfig(), CastConfig(target_dtype=E5M2)),
            ValueError,
            "target_dtype of cast_config_input_for_grad_weight must be torch.float8_e4m3fn, got torch.float8_e5m2",
        ),
        (lambda: convert_to_float8_training(nn.Linear(4, 4), config="rowwise"), TypeError, "config must be a Float8L"),
        (lambda: convert_to_float8_training(nn.Linear(4, 4), module_filter_fn="0"), TypeError, "True converts; got str"),
        (lambda: convert_to_float8_training(nn.Linear(4, 4).double()), TypeError, "weight of the model itself must be"),
        (lambda: convert_to_float8_training(nn.Linear(4, 4))(torch.ones(2, 5)), ValueError, r"shape \[..., 4\], got"),
        (
            lambda: convert_to_float8_training(nn.Linear(4, 4))(torch.ones(2, 4).bfloat16()),
            TypeError,
            "input must be torch.float32 as the weight, got torch.bfloat16",
        ),
    ],
    ids=range(13),
)  # fmt: skip
def test_bad_input_is_named(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
