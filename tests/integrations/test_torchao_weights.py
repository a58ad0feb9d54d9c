# SPDX-License-Identifier: Apache-2.0
"""Weights of torchao's tensor classes become QuantLinear's code by code."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowbit
from lowbit.integrations.torchao import from_torchao

ao = pytest.importorskip("torchao.quantization")


def test_an_nf4_tensor_keeps_its_codes() -> None:
    module = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    weight = torch.randn(128, 256)
    theirs = module.to_nf4(weight, 64, 256)
    model = nn.Linear(256, 128)
    state = from_torchao({"weight": theirs, "bias": model.bias.detach()})
    lowbit.load(model, state)
    assert model.spec.format == "nf4" and model.spec.group_size == 64
    packed = theirs.quantized_data.flatten()
    assert torch.equal(model.unpack()[0].flatten(), torch.stack((packed >> 4, packed & 15), 1).flatten())
    torch.testing.assert_close(model.dequantize(), theirs.get_original_weight(), rtol=2e-3, atol=0)  # 4 decimals there


def test_a_float8_tensor_is_read_exactly() -> None:
    theirs = nn.Sequential(nn.Linear(96, 40))
    ao.quantize_(theirs, ao.Float8WeightOnlyConfig())
    model = nn.Sequential(nn.Linear(96, 40))
    lowbit.load(model, from_torchao(theirs.state_dict()))
    assert model[0].spec.format == "fp8_e4m3"
    torch.testing.assert_close(model[0].dequantize(), theirs[0].weight.dequantize().float(), rtol=2e-7, atol=0)


def test_another_granularity_is_refused_by_name() -> None:
    theirs = nn.Sequential(nn.Linear(96, 40))
    ao.quantize_(theirs, ao.Float8WeightOnlyConfig(granularity=ao.PerTensor()))
    with pytest.raises(ValueError, match=r"from_torchao: 0.weight must be float8_e4m3fn with a scale per row, got .* in blocks of \[40, 96\]"):
        from_torchao(theirs.state_dict())
