# SPDX-License-Identifier: Apache-2.0
"""The formats that ``quantize_`` takes. ``FORMATS`` is the list: tests, documentation and benchmarks walk it."""

from __future__ import annotations

from lowbit.formats.algorithms import GPTQ, HQQ
from lowbit.formats.base import FormatConfig, MappingType, PerAxis, PerGroup, PerRow, PerToken
from lowbit.formats.block_sparse import BlockSparseWeightConfig, block_sparse_weight
from lowbit.formats.float import FloatWeightConfig, float_weight
from lowbit.formats.float8 import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8WeightOnlyConfig,
    float8_dynamic_activation_float8_weight,
    float8_weight_only,
)
from lowbit.formats.int4 import (
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt4WeightConfig,
    int4_weight_only,
    int8_dynamic_activation_int4_weight,
)
from lowbit.formats.int8 import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    int8_dynamic_activation_int8_weight,
    int8_weight_only,
)
from lowbit.formats.intx import (
    Int8DynamicActivationIntxWeightConfig,
    IntxWeightOnlyConfig,
    int8_dynamic_activation_intx_weight,
    intx_weight_only,
)
from lowbit.formats.lookup import FP4WeightOnlyConfig, NF4WeightOnlyConfig, fp4_weight_only, nf4_weight_only
from lowbit.formats.semi_sparse import (
    Int8DynamicActivationInt8SemiSparseWeightConfig,
    SemiSparseWeightConfig,
    int8_dynamic_activation_int8_semi_sparse_weight,
    semi_sparse_weight,
)
from lowbit.formats.spec import LinearSpec, StoredWeight

FORMATS: tuple[type[FormatConfig], ...] = (
    FloatWeightConfig,
    Int8WeightOnlyConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationInt4WeightConfig,
    NF4WeightOnlyConfig,
    FP4WeightOnlyConfig,
    Float8WeightOnlyConfig,
    Float8DynamicActivationFloat8WeightConfig,
    SemiSparseWeightConfig,
    Int8DynamicActivationInt8SemiSparseWeightConfig,
    IntxWeightOnlyConfig,
    Int8DynamicActivationIntxWeightConfig,
)

__all__ = [
    "FORMATS",
    "GPTQ",
    "HQQ",
    "BlockSparseWeightConfig",
    "FP4WeightOnlyConfig",
    "Float8DynamicActivationFloat8WeightConfig",
    "Float8WeightOnlyConfig",
    "FloatWeightConfig",
    "FormatConfig",
    "Int4WeightOnlyConfig",
    "Int8DynamicActivationInt4WeightConfig",
    "Int8DynamicActivationInt8SemiSparseWeightConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Int8DynamicActivationIntxWeightConfig",
    "Int8WeightOnlyConfig",
    "IntxWeightOnlyConfig",
    "LinearSpec",
    "MappingType",
    "NF4WeightOnlyConfig",
    "PerAxis",
    "PerGroup",
    "PerRow",
    "PerToken",
    "SemiSparseWeightConfig",
    "StoredWeight",
    "block_sparse_weight",
    "float8_dynamic_activation_float8_weight",
    "float8_weight_only",
    "float_weight",
    "fp4_weight_only",
    "int4_weight_only",
    "int8_dynamic_activation_int4_weight",
    "int8_dynamic_activation_int8_semi_sparse_weight",
    "int8_dynamic_activation_int8_weight",
    "int8_dynamic_activation_intx_weight",
    "int8_weight_only",
    "intx_weight_only",
    "nf4_weight_only",
    "semi_sparse_weight",
]
