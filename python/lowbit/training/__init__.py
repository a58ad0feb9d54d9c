# SPDX-License-Identifier: Apache-2.0
"""Training for and in low precision: quantization-aware training, int8 products, int8 weights and ternary weights with
``quantize_``; float8 products and 2:4 sparsity with functions of their own."""

from __future__ import annotations

from lowbit.training.bitnet import BitNetLinear, BitNetTrainingConfig
from lowbit.training.distillation import distillation_loss
from lowbit.training.experts import FakeQuantizedExperts, Float8Experts, Int8MixedPrecisionExperts
from lowbit.training.float8 import convert_to_float8_training, end_float8_training
from lowbit.training.float8_config import (
    CastConfig,
    Float8GemmConfig,
    Float8LinearConfig,
    Float8LinearRecipeName,
    ScalingGranularity,
    ScalingType,
)
from lowbit.training.float8_linear import Float8Linear
from lowbit.training.int8_linear import Int8MixedPrecisionLinear
from lowbit.training.int8_mixed_precision import Int8MixedPrecisionTrainingConfig
from lowbit.training.int8_weight_linear import Int8WeightLinear
from lowbit.training.int8_weight_only import Int8WeightOnlyQuantizedTrainingConfig
from lowbit.training.layers import FakeQuantizedEmbedding, FakeQuantizedLinear
from lowbit.training.qat import QATConfig
from lowbit.training.semi_sparse import (
    SemiSparseActivationLinear,
    SemiSparseLinear,
    swap_linear_with_semi_sparse_linear,
    swap_semi_sparse_linear_with_linear,
)

__all__ = [
    "BitNetLinear",
    "BitNetTrainingConfig",
    "CastConfig",
    "FakeQuantizedEmbedding",
    "FakeQuantizedExperts",
    "FakeQuantizedLinear",
    "Float8GemmConfig",
    "Float8Experts",
    "Float8Linear",
    "Float8LinearConfig",
    "Float8LinearRecipeName",
    "Int8MixedPrecisionExperts",
    "Int8MixedPrecisionLinear",
    "Int8MixedPrecisionTrainingConfig",
    "Int8WeightLinear",
    "Int8WeightOnlyQuantizedTrainingConfig",
    "QATConfig",
    "ScalingGranularity",
    "ScalingType",
    "SemiSparseActivationLinear",
    "SemiSparseLinear",
    "convert_to_float8_training",
    "distillation_loss",
    "end_float8_training",
    "swap_linear_with_semi_sparse_linear",
    "swap_semi_sparse_linear_with_linear",
]
