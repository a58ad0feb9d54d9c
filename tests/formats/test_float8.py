# SPDX-License-Identifier: Apache-2.0
"""fp8_e4m3: codes are torch's float8_e4m3fn, rows of zeros stay zeros, and dynamic activations are rounded as torch
rounds them."""

from __future__ import annotations

import pytest
import torch

import lowbit
from lowbit.formats import LinearSpec, PerGroup, PerRow


def layer(weight: torch.Tensor, config: lowbit.formats.FormatConfig) -> lowbit.QuantLinear:
    model = torch.nn.Sequential(torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False))
    model[0].weight.data = weight
    lowbit.quantize_(model, config, lambda module, _: module is model[0])  # few rows are packed if asked for
    return model[0]


def test_all_finite_codes_are_read_as_torch_reads_them() -> None:
    codes = torch.arange(256, dtype=torch.uint8)[None]
    codes[0, 127] = codes[0, 255] = 0
    quantized = lowbit.QuantLinear.pack(codes, torch.ones(1, 1), None, LinearSpec("fp8_e4m3"))
    assert torch.equal(quantized.dequantize(), codes.view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("code", (127, 255))
def test_a_code_of_nan_is_refused(code: int) -> None:
    with pytest.raises(ValueError, match=r"pack: codes must be finite, got nan \(127 or 255\)"):
        lowbit.QuantLinear.pack(torch.full((3, 5), code, dtype=torch.uint8), torch.ones(3, 1), None, LinearSpec("fp8_e4m3"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_rounded_as_torch_rounds_them_with_a_scale_of_amax_over_448(dtype: torch.dtype) -> None:
    weight = (torch.randn(40, 100) * torch.exp(torch.randn(40, 100))).to(dtype)
    weight[7] = 0
    quantized = layer(weight, lowbit.float8_weight_only())
    codes, scale, _ = quantized.unpack()
    wanted = weight.float().abs().amax(1, keepdim=True) / 448
    assert torch.equal(scale, wanted)
    rounded = (weight.float() / wanted.where(wanted > 0, torch.tensor(1.0))).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(codes.view(torch.float8_e4m3fn).float(), rounded.float())
    assert (quantized.dequantize()[7] == 0).all() and quantized.dequantize().isfinite().all()


def test_the_largest_weight_saturates_where_its_group_scale_is_rounded_down() -> None:
    weight = torch.randn(64, 256)
    dense = layer(weight, lowbit.float8_weight_only(32)).dequantize()
    assert dense.isfinite().all()
    assert ((dense - weight).abs() <= weight.abs() / 15 + weight.abs().amax() * 2.0**-17).all()


def test_dynamic_activations_are_float8_times_the_scale_of_their_row() -> None:
    weight, x = torch.randn(24, 96), torch.randn(5, 96) * 10.0 ** torch.arange(-2, 3)[:, None]
    x[2] = 0
    quantized = layer(weight, lowbit.float8_dynamic_activation_float8_weight())
    scale = x.abs().amax(1, keepdim=True) / 448
    rounded = (x * torch.where(scale > 0, 1 / scale, 0)).to(torch.float8_e4m3fn).float() * scale
    wanted = rounded.double() @ quantized.dequantize().double().T
    torch.testing.assert_close(quantized(x).double(), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()) * 1e-2)
    assert (quantized(x)[2] == 0).all()
    assert quantized.spec.name == "fp8_e4m3 per-channel float8-activations per row"


def test_small_weights_are_read_exactly_also_below_the_smallest_normal_float8() -> None:
    weight = torch.cat([torch.ones(3, 1), 2.0 ** -torch.arange(5.0, 20.0).repeat(3, 1)], dim=1)
    quantized = layer(weight, lowbit.float8_weight_only())
    scale = torch.tensor(1.0) / 448
    wanted = (weight / scale).to(torch.float8_e4m3fn).float() * scale
    torch.testing.assert_close(quantized.dequantize(), wanted, rtol=2e-7, atol=0)
    torch.testing.assert_close(quantized(torch.eye(16)).T, wanted, rtol=2e-7, atol=0)


def test_the_fields_of_torchao(subtests: pytest.Subtests) -> None:
    make = lowbit.Float8WeightOnlyConfig
    assert make(granularity=PerGroup(64)).spec(torch.float32) == LinearSpec("fp8_e4m3", 64) == lowbit.float8_weight_only(64).spec(torch.float32)
    assert make(granularity=PerRow()).spec(torch.float32) == LinearSpec("fp8_e4m3") == make().spec(torch.float32)
    dynamic = lowbit.Float8DynamicActivationFloat8WeightConfig
    assert dynamic(granularity=(PerRow(), PerGroup(32))).spec(torch.float32) == LinearSpec("fp8_e4m3", 32, x_format="float8_row")
    for changes, text in (
        (dict(weight_dtype=torch.float8_e5m2), "weight_dtype must be torch.float8_e4m3fn"),
        (dict(granularity=(PerGroup(32), PerGroup(32))), "groups of activations must be 0"),
        (dict(granularity=(PerRow(),)), "granularity must be one granularity, or a pair for activations and weight, got 1"),
        (dict(activation_value_ub=1.0), "activation_value_ub must be None"),
        (dict(packing_format="preshuffled"), "packing_format must be 'plain'"),
    ):
        with subtests.test(text), pytest.raises(ValueError, match=f"float8_dynamic_activation_float8_weight: {text}"):
            dynamic(**changes)


def test_torchaos_own_objects_are_read() -> None:
    ao = pytest.importorskip("torchao.quantization")
    model = torch.nn.Sequential(torch.nn.Linear(64, 32))
    lowbit.quantize_(model, ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow()))
    assert model[0].spec == LinearSpec("fp8_e4m3", x_format="float8_row")
    with pytest.raises(ValueError, match="granularity must be PerRow.*less precise"):
        lowbit.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 32)), ao.Float8DynamicActivationFloat8WeightConfig())


@pytest.mark.parametrize("m", [1, 40])
@pytest.mark.parametrize("size", [1e-30, 1e34])
def test_activations_of_any_size_enter_as_they_are(size: float, m: int) -> None:
    quantized = layer(torch.randn(24, 96) * 1e-3, lowbit.float8_weight_only())
    x = torch.randn(m, 96) * size
    wanted = x.double() @ quantized.dequantize().double().T
    torch.testing.assert_close(quantized(x).double(), wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()))
