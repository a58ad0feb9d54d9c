# SPDX-License-Identifier: Apache-2.0
"""GPTQ and HQQ as configurations: what they promise of the output, extreme weights, what a layer keeps of them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lowbit
from lowbit.quant.gptq import Factor, gptq
from lowbit.quant.hqq import hqq

MAKERS = [lowbit.int4_weight_only, lowbit.int8_dynamic_activation_int4_weight]


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("group_size", [32, 256, None])
@pytest.mark.parametrize("make", MAKERS)
def test_gptq_runs_for_every_group_size_and_order(make, group_size, act_order):
    model = nn.Sequential(nn.Linear(300, 17), nn.ReLU(), nn.Linear(17, 9))
    x = torch.randn(64, 300) * torch.logspace(-2, 1, 300)
    x[:, 5] = 0  # a channel that is never used
    calibration = lowbit.calibrate(model, [x], hessian=True)
    quantized, plain = copy.deepcopy(model), copy.deepcopy(model)
    config = make(group_size, algorithm=lowbit.GPTQ(act_order=act_order))
    assert "algorithm=GPTQ(" in str(config)
    lowbit.quantize_(quantized, config, calibration=calibration)
    lowbit.quantize_(plain, make(group_size, scale="absmax"))
    wanted = model[0](x)
    assert (quantized[0](x) - wanted).square().mean() < 0.7 * (plain[0](x) - wanted).square().mean()


def test_gptq_of_uncorrelated_inputs_is_rounding_to_the_nearest():
    weight, scale = torch.randn(20, 96), torch.full((20, 3), 0.3)
    factor = Factor.of(torch.eye(96), lowbit.GPTQ())
    codes, _, _ = gptq(weight, factor, 32, 15, True, lambda part, h: (scale, torch.full((20, 3), 8.0)))
    assert torch.equal(codes, torch.round(weight / 0.3 + 8).clamp(0, 15).byte())


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("k", [96, 300])
def test_gptq_chooses_the_codes_of_the_published_form(k, act_order):
    """Which takes the Cholesky factor of the inverse of the hessian, and moves the channels that are left."""
    weight, x = torch.randn(7, k, dtype=torch.float64), torch.randn(500, k, dtype=torch.float64)
    hessian = (x @ torch.randn(k, k, dtype=torch.float64)).T.cov() / k
    scale, zero = torch.full((7, 1), 0.3), torch.full((7, 1), 8.0)
    factor = Factor.of(hessian.float(), lowbit.GPTQ(act_order=act_order))
    codes, _, _ = gptq(weight.float(), factor, 0, 15, act_order, lambda part, h: (scale.clone(), zero.clone()))

    order = hessian.diagonal().argsort(descending=True) if act_order else torch.arange(k)
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(k, dtype=torch.float64)
    inverse = torch.linalg.cholesky(damped[order][:, order].inverse(), upper=True)
    left, wanted = weight[:, order].clone(), torch.empty(7, k, dtype=torch.float64)
    for i in range(k):
        wanted[:, i] = (left[:, i] / 0.3 + 8).round().clamp(0, 15)
        error = (left[:, i] - 0.3 * (wanted[:, i] - 8)) / inverse[i, i]
        left[:, i:] -= error[:, None] * inverse[i, i:]
    wanted = wanted[:, order.argsort()]

    def loss(codes: torch.Tensor) -> float:
        error = weight - 0.3 * (codes.double() - 8)
        return float((error @ hessian * error).sum())

    assert (codes != wanted).double().mean() < 0.02  # a tie that float32 decides otherwise moves the channels after it
    assert loss(codes) == pytest.approx(loss(wanted), rel=0.02)
    error = (weight - 0.3 * (codes.double() - 8)).float()
    assert float(factor.loss(error).sum()) == pytest.approx(loss(codes), rel=1e-4)


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(5, 64),
        torch.randn(1, 64),
        torch.randn(3, 64) * 1e18,
        torch.randn(3, 64) * 1e-18,
        torch.randn(99, 1).expand(99, 64),
        torch.randn(99, 64) * torch.logspace(-12, 12, 64),
    ],
    ids=["dead", "one row", "huge", "tiny", "rank 1", "24 decades"],
)
def test_gptq_finds_codes_whatever_the_rank_of_the_inputs(x, act_order):
    model = nn.Sequential(nn.Linear(64, 8))
    weight = model[0].weight.detach().clone()
    config = lowbit.int4_weight_only(32, algorithm=lowbit.GPTQ(act_order=act_order))
    report = lowbit.quantize_(model, config, calibration=[x])
    error = (model[0].dequantize() - weight).abs().max()
    assert error < 2 * weight.abs().max() and report.quantized[0].error_db == report.quantized[0].error_db


@pytest.mark.parametrize("group_size", [0, 32, 128])
def test_hqq_makes_the_error_sparser_than_the_range_does(group_size):
    weight = torch.distributions.StudentT(3.0).sample((40, 200))
    codes, scale, zero = hqq(weight, group_size, 15, lowbit.HQQ())
    first, first_scale, first_zero = hqq(weight, group_size, 15, lowbit.HQQ(iterations=1))
    assert torch.equal(scale, first_scale)

    def mean_error(codes: torch.Tensor, zero: torch.Tensor) -> float:
        spread = [part.repeat_interleave(group_size or 200, dim=1)[:, :200] for part in (scale, zero)]
        return float((weight - spread[0] * (codes.float() - spread[1])).abs().mean())

    assert mean_error(codes, zero) < mean_error(first, first_zero)


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(3, 70),
        torch.full((3, 70), -0.7),
        torch.randn(3, 70) * 1e-41,
        torch.randn(3, 70).clamp(-3, 3) * 1e38,
        torch.randn(3, 70) * 1e-3 + 100,
    ],
    ids=["zeros", "constant", "subnormal", "huge", "far from zero"],
)
def test_hqq_takes_any_finite_weight(weight):
    layer = nn.Linear(70, 3, bias=False)
    layer.weight = nn.Parameter(weight)
    model = nn.Sequential(layer)
    lowbit.quantize_(model, lowbit.int4_weight_only(32, algorithm=lowbit.HQQ()), lambda module, name: name == "0")
    error = (model[0].dequantize().double() - weight.double()).abs().max()
    assert error <= weight.double().abs().max() / 15 + 1e-38


@pytest.mark.parametrize("group_size", [None, 32])
def test_hqqs_zero_points_are_those_that_the_kernels_use(group_size):
    model = nn.Sequential(nn.Linear(256, 16, bias=False))
    with torch.no_grad():
        model[0].weight[::3, 7] = 5000
    lowbit.quantize_(model, lowbit.int4_weight_only(group_size, algorithm=lowbit.HQQ()))
    codes, scale, zero = (value.double() for value in model[0].unpack())
    groups = codes.view(16, scale.shape[1], -1)
    weight = (groups - zero[..., None]) * scale[..., None]
    torch.testing.assert_close(model[0].dequantize().double(), weight.view(16, 256), rtol=0, atol=2e-6 * scale.max().item())


def test_hqq_is_asymmetric_and_torchaos_name_of_it_is_taken():
    config = lowbit.Int4WeightOnlyConfig(32, int4_choose_qparams_algorithm="hqq")
    assert config.algorithm == lowbit.HQQ() and config.spec(torch.float32).asymmetric
    model = nn.Sequential(nn.Linear(64, 8))
    lowbit.quantize_(model, config)
    assert model[0].spec.asymmetric and model[0].unpack()[2].frac().any()


def test_a_layer_does_not_keep_the_algorithm_and_packs_again_without_it():
    model = nn.Sequential(nn.Linear(64, 8))
    calibration = lowbit.calibrate(model, [torch.randn(99, 64)], hessian=True)
    lowbit.quantize_(model, lowbit.int4_weight_only(32, algorithm=lowbit.GPTQ()), calibration=calibration)
    assert model[0].spec == lowbit.int4_weight_only(32).spec(torch.float32)
    with pytest.raises(ValueError, match="pack_weight: inputs must have the mean of x x"):
        lowbit.QuantLinear.from_linear(
            nn.Linear(64, 8), lowbit.int4_weight_only(32, algorithm=lowbit.GPTQ()).spec(torch.float32)
        )


@pytest.mark.parametrize("algorithm", (lowbit.GPTQ(), lowbit.HQQ()), ids=str)
def test_on_the_meta_device_only_the_structure_changes(algorithm):
    model = nn.Sequential(nn.Linear(64, 8, device="meta"))
    lowbit.quantize_(model, lowbit.int4_weight_only(32, algorithm=algorithm))
    assert model[0].weight.is_meta


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: lowbit.int4_weight_only(scale="mse"), "int4_weight_only: scale must be one of 'absmax', 'search' or None"),
        (
            lambda: lowbit.int4_weight_only(scale="search", mapping_type="symmetric_no_clipping_err"),
            "int4_weight_only: scale must be 'absmax' or None with MappingType.SYMMETRIC_NO_CLIPPING_ERR",
        ),
        (
            lambda: lowbit.int4_weight_only(scale="search", algorithm=lowbit.HQQ()),
            r"int4_weight_only: scale must be None \(HQQ takes the range of each group\), got scale='search'",
        ),
        (lambda: lowbit.GPTQ(damping=0), "GPTQ: damping must be above 0, got damping=0"),
        (lambda: lowbit.HQQ(iterations=0), "HQQ: iterations must be an int of at least 1, got iterations=0"),
        (lambda: lowbit.HQQ(p=2), "HQQ: p must be above 0 and at most 1, got p=2"),
        (lambda: lowbit.HQQ(kappa=0), "HQQ: kappa must be above 0, got kappa=0"),
    ],
)
def test_bad_values_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_an_algorithm_is_an_object():
    with pytest.raises(TypeError, match=r"int4_weight_only: algorithm must be lowbit.GPTQ\(\), lowbit.HQQ\(\) or None"):
        lowbit.int4_weight_only(algorithm="gptq")
