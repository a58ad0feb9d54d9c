# SPDX-License-Identifier: Apache-2.0
"""``torchao.quantization`` on lowbit: `quantize_`, configurations, granularities, and functions that torchao has
removed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lowbit.formats import (
    Float8DynamicActivationFloat8WeightConfig as Float8DynamicActivationFloat8WeightConfig,
    Float8WeightOnlyConfig as Float8WeightOnlyConfig,
    Int4WeightOnlyConfig as Int4WeightOnlyConfig,
    Int8DynamicActivationInt4WeightConfig as Int8DynamicActivationInt4WeightConfig,
    Int8DynamicActivationInt8WeightConfig as Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig as Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig as Int8WeightOnlyConfig,
    IntxWeightOnlyConfig as IntxWeightOnlyConfig,
    MappingType as MappingType,
    PerAxis as PerAxis,
    PerGroup as PerGroup,
    PerRow as PerRow,
    PerToken as PerToken,
    float8_dynamic_activation_float8_weight as float8_dynamic_activation_float8_weight,
    float8_weight_only as float8_weight_only,
    int4_weight_only as int4_weight_only,
    int8_dynamic_activation_int4_weight as int8_dynamic_activation_int4_weight,
    int8_dynamic_activation_int8_semi_sparse_weight as int8_dynamic_activation_int8_semi_sparse_weight,
    int8_dynamic_activation_int8_weight as int8_dynamic_activation_int8_weight,
    int8_dynamic_activation_intx_weight as int8_dynamic_activation_intx_weight,
    int8_weight_only as int8_weight_only,
    intx_weight_only as intx_weight_only,
)
from lowbit.formats.torchao import missing
from lowbit.quant import (
    dequantize_ as dequantize_,
    quantize_ as quantize_,
)


@dataclass(frozen=True, slots=True)
class PerTensor:
    """One scale for a whole tensor. It exists because programs import it; configurations refuse it with a reason."""


def __getattr__(name: str) -> Any:
    raise missing(__name__, name)
