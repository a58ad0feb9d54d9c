# SPDX-License-Identifier: Apache-2.0
"""Every format of the list, each with its default and with one asymmetric or per-channel variation; but 2:4, which
wants sizes in fours (tests/formats/test_semi_sparse.py)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import lowbit
from lowbit.formats import FORMATS, SemiSparseWeightConfig

CONFIGS = [cls() for cls in FORMATS if not issubclass(cls, SemiSparseWeightConfig)] + [
    lowbit.float_weight(torch.bfloat16),
    lowbit.int8_weight_only(64, mapping_type=lowbit.MappingType.ASYMMETRIC),
    lowbit.int4_weight_only(None, mapping_type=lowbit.MappingType.SYMMETRIC_NO_CLIPPING_ERR),
    lowbit.intx_weight_only(torch.int3, 32),
    lowbit.int8_dynamic_activation_int4_weight(
        64, mapping_type=lowbit.MappingType.ASYMMETRIC, act_mapping_type=lowbit.MappingType.ASYMMETRIC
    ),
]


@pytest.fixture(params=CONFIGS, ids=str)
def config(request):
    return request.param


@pytest.fixture
def model() -> nn.Module:
    """Two levels, sizes that are no multiple of anything, one layer without bias."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(100, 33), nn.ReLU(), nn.Sequential(nn.Linear(33, 65, bias=False), nn.Tanh(), nn.Linear(65, 9))
    )


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(5, 100, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def tied() -> Callable[[], nn.Module]:
    """Makes a float model of two layers that share a weight."""

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50))
        model[1].weight = model[0].weight
        return model

    return make
