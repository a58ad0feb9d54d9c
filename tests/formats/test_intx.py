# SPDX-License-Identifier: Apache-2.0
"""Weights of 2 to 8 bits: torchao's rounding, searched scales, the same numbers whatever row multiplies them."""

from __future__ import annotations

import pytest
import torch

import lowbit
from lowbit import _C, MappingType, testing

WIDTHS = {bits: getattr(torch, f"int{bits}") for bits in range(2, 9)}
OWN = (2, 3, 5, 6, 7)  # without a class of their own


def layer(weight: torch.Tensor, config: object) -> lowbit.QuantLinear:
    model = torch.nn.Sequential(torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False))
    model[0].weight.data = weight.clone()
    lowbit.quantize_(model, config)
    return model[0]


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("mapping", ["SYMMETRIC", "ASYMMETRIC"])
@pytest.mark.parametrize("group_size", [None, 32, 64])
def test_weights_are_rounded_as_torchao_rounds_them(bits: int, mapping: str, group_size: int | None) -> None:
    ao = pytest.importorskip("torchao.quantization")
    weight = torch.randn(48, 192)
    theirs = torch.nn.Sequential(torch.nn.Linear(192, 48, bias=False))
    theirs[0].weight.data = weight.clone()
    granularity = ao.PerGroup(group_size) if group_size else ao.PerAxis(0)
    config = ao.IntxWeightOnlyConfig(WIDTHS[bits], granularity, getattr(ao.MappingType, mapping))
    ao.quantize_(theirs, config)
    ours, wanted = layer(weight, config).dequantize(), theirs[0].weight.dequantize()
    step = 2 * weight.abs().amax() / (2**bits - 1)
    same = (ours - wanted).abs() <= 2e-3 * weight.abs().amax()  # our scales of groups have 11 bits: of 7 bits a code in 30 is the next
    assert same.float().mean() > 0.9 and (ours - wanted).abs().max() <= 1.01 * step


@pytest.mark.parametrize("mapping", (MappingType.SYMMETRIC, MappingType.ASYMMETRIC))
@pytest.mark.parametrize("bits", OWN)
@pytest.mark.parametrize("group_size", [None, 32, 256])
def test_codes_scales_and_zero_points_go_in_and_come_back(bits: int, group_size: int | None, mapping: MappingType) -> None:
    spec = lowbit.intx_weight_only(WIDTHS[bits], group_size, mapping_type=mapping).spec(torch.float32)
    n, k = 37, 300
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8)
    scale = 2.0 ** torch.randint(-3, 4, (n, spec.groups(k)))
    zero = torch.rand(n, spec.groups(k)).half().float() * 2**bits if spec.asymmetric else None
    packed = lowbit.QuantLinear.pack(codes, scale, zero, spec)
    for got, wanted in zip(packed.unpack(), (codes, scale, zero), strict=True):
        assert wanted is None or torch.equal(got, wanted.half().float() if wanted is zero else wanted)
    steps = codes.double() - packed.unpack()[2].double().repeat_interleave(spec.group_size or k, 1)[:, :k]
    wanted = scale.double().repeat_interleave(spec.group_size or k, 1)[:, :k] * steps
    assert (packed.dequantize() - wanted).abs().max() <= 2.0**-22 * wanted.abs().max()
    assert packed.weight.numel() <= 48 * (320 * bits / 8) + 3 * (128 + 2 * (64 + 32 * spec.groups(k)))


def test_more_bits_are_less_error_and_a_search_is_never_worse() -> None:
    weight = torch.randn(64, 512)
    for group_size in (None, 64):
        last = 0.0
        for dtype in WIDTHS.values():
            error = {}
            for scale in ("absmax", "search"):
                ours = layer(weight, lowbit.intx_weight_only(dtype, group_size, scale=scale)).dequantize()
                error[scale] = float((ours - weight).square().sum())
            db = -10 * torch.tensor(error["search"] / float(weight.square().sum())).log10().item()
            assert error["search"] <= error["absmax"] and db > last + 4
            last = db


@pytest.mark.parametrize("bits", OWN)
def test_every_row_that_takes_int8_activations_gives_the_same_bits(bits: int, subtests: pytest.Subtests) -> None:
    format = f"int{bits}"
    for x_format in ("int8_row", "int8_group", "int8_row_asymmetric"):
        for mapping, m in (("symmetric", 1), ("asymmetric", 1), ("symmetric", 40), ("asymmetric", 19)):
            with subtests.test(x_format=x_format, mapping=mapping, m=m):
                case = testing.LinearCase(m, 50, 300, "float32", format, 64, mapping, x_format)
                data = testing.make_data(case)
                names = [row["name"] for row in testing.rows() if row["available"] and testing.serves(row["name"], case)]
                assert any(name.startswith(f"linear_{format}_int8_") for name in names)
                results = [testing.run_linear(case, data, name) for name in names]
                assert all(torch.equal(other, results[0]) for other in results)


@pytest.mark.parametrize("algorithm", [lowbit.HQQ(), lowbit.GPTQ(act_order=False)], ids=["hqq", "gptq"])
@pytest.mark.parametrize("bits", [2, 3, 5])
def test_algorithms_find_codes_of_every_width(bits: int, algorithm: object) -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(128, 40)), torch.randn(256, 128) * torch.logspace(-1, 1, 128)
    wanted = model(x)
    config = lowbit.intx_weight_only(WIDTHS[bits], 64, algorithm=algorithm)
    calibration = None
    if isinstance(algorithm, lowbit.GPTQ):
        calibration = lowbit.calibrate(model, [x], hessian=True)
    report = lowbit.quantize_(model, config, calibration=calibration)
    assert report.rows[0].error_db > {2: 3, 3: 9, 5: 22}[bits]
    assert int(model[0].unpack()[0].max()) <= 2**bits - 1
    assert (model(x) - wanted).norm() < wanted.norm()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: lowbit.intx_weight_only(torch.int1), "intx_weight_only: weight_dtype must be torch.int2 to torch.int8, got"),
        (lambda: lowbit.intx_weight_only(torch.uint3), "got weight_dtype=torch.uint3"),
        (lambda: lowbit.intx_weight_only(torch.int3, 48), "group_size must be 32, 64, 128, 256 or None"),
        (
            lambda: lowbit.Int8DynamicActivationIntxWeightConfig(torch.float32),
            "int8_dynamic_activation_intx_weight: weight_dtype must be torch.int2 to torch.int8",
        ),
    ],
)
def test_what_is_no_width_or_group_is_refused(make, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize("bits", OWN)
def test_the_widths_have_names_and_rows_of_their_own(bits: int) -> None:
    names = {row["name"] for row in testing.rows()}
    facts = _C.FORMAT_FACTS[f"int{bits}"]
    assert (facts["bits"], facts["zero"], facts["code_max"]) == (bits, 2 ** (bits - 1), 2**bits - 1)
    assert {f"linear_int{bits}_scalar", f"linear_int{bits}_int8_scalar"} <= names
