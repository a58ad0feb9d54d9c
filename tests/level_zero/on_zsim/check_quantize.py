# SPDX-License-Identifier: Apache-2.0
"""quantize and all_finite on zsim: the bytes of the CPU."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from quantize_calls import assert_as_on_the_cpu
from torch import nn

import lowbit
from lowbit import _C, testing
from lowbit.devices import level_zero

level_zero.enable()
DEVICE = "lowbit_ze:0"
CONFIGS = (
    lowbit.int8_dynamic_activation_int8_weight(),
    lowbit.int4_weight_only(group_size=32, scale="search"),
    lowbit.nf4_weight_only(),
    lowbit.float_weight(torch.bfloat16),
)


@pytest.mark.parametrize("format", testing.dense_formats())
def test_bytes_are_those_of_the_cpu(format: str) -> None:
    assert_as_on_the_cpu(format, DEVICE, "quantize_panels_level_zero")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_inf_and_nan_are_found_wherever_they_are(dtype: torch.dtype) -> None:
    for count, at in ((1, 0), (300, 299), (4097, 4096), (1024 * 4096 + 5, 1024 * 4096 + 4)):
        x = torch.full((count,), torch.finfo(dtype).max, dtype=dtype)
        assert _C.all_finite(x.to(DEVICE))
        for value in (torch.inf, torch.nan):
            x[at] = value
            assert not _C.all_finite(x.to(DEVICE))
    assert _C.last_kernel("all_finite") == "all_finite_level_zero"


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_model_is_quantized_where_it_is(config: object) -> None:
    """Bytes and report are those of the model that was quantized on the CPU; the CPU's rows are not asked."""
    model = nn.Sequential(nn.Linear(128, 40), nn.ReLU(), nn.Linear(40, 128, bias=False))
    there = copy.deepcopy(model).to(DEVICE)
    here_report, there_report = lowbit.quantize_(model, config), lowbit.quantize_(there, config)
    assert _C.last_kernel("quantize") == "quantize_panels_level_zero"
    for name, value in model.state_dict().items():
        assert torch.equal(value, there.state_dict()[name].cpu()), name
        assert there.state_dict()[name].device == value.device or there.state_dict()[name].device == torch.device(DEVICE)
    told = [re.sub(r"linear_\w+( \(m=1\), linear_\w+)?", "", str(report)) for report in (here_report, there_report)]  # rows apart
    assert told[0].split() == told[1].split()
