# SPDX-License-Identifier: Apache-2.0
"""The formats that ``quantize_`` accepts. Tests, documentation and benchmarks iterate over ``FORMATS``."""

from __future__ import annotations

from lowbit.formats.algorithms import (
    GPTQ as GPTQ,
    HQQ as HQQ,
)
from lowbit.formats.base import (
    FormatConfig as FormatConfig,
    MappingType as MappingType,
    PerAxis as PerAxis,
    PerGroup as PerGroup,
    PerRow as PerRow,
    PerToken as PerToken,
)
from lowbit.formats.block_sparse import (
    BlockSparseWeightConfig as BlockSparseWeightConfig,
    block_sparse_weight as block_sparse_weight,
)
from lowbit.formats.float import (
    FloatWeightConfig as FloatWeightConfig,
    float_weight as float_weight,
)
from lowbit.formats.float8 import (
    Float8DynamicActivationFloat8WeightConfig as Float8DynamicActivationFloat8WeightConfig,
    Float8WeightOnlyConfig as Float8WeightOnlyConfig,
    float8_dynamic_activation_float8_weight as float8_dynamic_activation_float8_weight,
    float8_weight_only as float8_weight_only,
)
from lowbit.formats.int4 import (
    Int4WeightOnlyConfig as Int4WeightOnlyConfig,
    Int8DynamicActivationInt4WeightConfig as Int8DynamicActivationInt4WeightConfig,
    int4_weight_only as int4_weight_only,
    int8_dynamic_activation_int4_weight as int8_dynamic_activation_int4_weight,
)
from lowbit.formats.int8 import (
    Int8DynamicActivationInt8WeightConfig as Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig as Int8WeightOnlyConfig,
    int8_dynamic_activation_int8_weight as int8_dynamic_activation_int8_weight,
    int8_weight_only as int8_weight_only,
)
from lowbit.formats.intx import (
    Int8DynamicActivationIntxWeightConfig as Int8DynamicActivationIntxWeightConfig,
    IntxWeightOnlyConfig as IntxWeightOnlyConfig,
    int8_dynamic_activation_intx_weight as int8_dynamic_activation_intx_weight,
    intx_weight_only as intx_weight_only,
)
from lowbit.formats.lookup import (
    FP4WeightOnlyConfig as FP4WeightOnlyConfig,
    NF4WeightOnlyConfig as NF4WeightOnlyConfig,
    fp4_weight_only as fp4_weight_only,
    nf4_weight_only as nf4_weight_only,
)
from lowbit.formats.semi_sparse import (
    Int8DynamicActivationInt8SemiSparseWeightConfig as Int8DynamicActivationInt8SemiSparseWeightConfig,
    SemiSparseWeightConfig as SemiSparseWeightConfig,
    int8_dynamic_activation_int8_semi_sparse_weight as int8_dynamic_activation_int8_semi_sparse_weight,
    semi_sparse_weight as semi_sparse_weight,
)
from lowbit.formats.spec import (
    LinearSpec as LinearSpec,
    StoredWeight as StoredWeight,
)

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
