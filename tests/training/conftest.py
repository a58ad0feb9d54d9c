# SPDX-License-Identifier: Apache-2.0
"""Configurations that a model can be trained for: every one with codes but 2:4, and every width of integers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit.formats import FORMATS, FloatWeightConfig, SemiSparseWeightConfig
from lowbit.training import QATConfig

ASYMMETRIC = lowbit.MappingType.ASYMMETRIC
CONFIGS = [cls() for cls in FORMATS if not issubclass(cls, (FloatWeightConfig, SemiSparseWeightConfig))] + [
    *(lowbit.intx_weight_only(getattr(torch, f"int{bits}"), 32) for bits in range(2, 9)),
    lowbit.intx_weight_only(torch.int3, None, mapping_type=ASYMMETRIC),
    lowbit.int8_dynamic_activation_intx_weight(torch.int6, 64),
    lowbit.int8_dynamic_activation_intx_weight(torch.int2, None, mapping_type=ASYMMETRIC),
    lowbit.int8_dynamic_activation_int8_weight(32, act_mapping_type=ASYMMETRIC),
    lowbit.int8_dynamic_activation_int4_weight(64, mapping_type=ASYMMETRIC, act_mapping_type=ASYMMETRIC),
    lowbit.Int8DynamicActivationInt4WeightConfig(32, act_granularity=lowbit.PerRow()),
    lowbit.int4_weight_only(None, mapping_type=lowbit.MappingType.SYMMETRIC_NO_CLIPPING_ERR),
    lowbit.fp4_weight_only(None),
    lowbit.float8_weight_only(32),
]


@pytest.fixture(params=CONFIGS, ids=str)
def config(request: pytest.FixtureRequest) -> lowbit.formats.FormatConfig:
    return request.param


@pytest.fixture
def model() -> nn.Module:
    """Sizes that are no multiple of anything, one layer without bias."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(100, 33), nn.GELU(), nn.Linear(33, 65, bias=False), nn.Tanh(), nn.Linear(65, 9))


@pytest.fixture
def train() -> Callable[..., list[Tensor]]:
    """Some steps of AdamW on fixed data; returns the losses."""

    def run(
        model: nn.Module, steps: int = 4, optimizer: torch.optim.Optimizer | None = None, first: int = 0
    ) -> list[Tensor]:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = optimizer or torch.optim.AdamW(trained, lr=3e-3)
        losses = []
        for step in range(first, first + steps):
            x = torch.randn(12, 100, generator=torch.Generator().manual_seed(step)).to(trained[0].dtype)
            loss = (model(x) - x[:, :9].sin()).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    return run


@pytest.fixture
def prepared(model: nn.Module) -> Callable[..., nn.Module]:
    """A copy of the model, prepared for a configuration."""

    def make(config: lowbit.formats.FormatConfig, dtype: torch.dtype = torch.float32, **options: object) -> nn.Module:
        made = copy.deepcopy(model).to(dtype)
        lowbit.quantize_(made, QATConfig(config, **options))
        return made

    return make
