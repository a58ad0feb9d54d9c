# SPDX-License-Identifier: Apache-2.0
"""Training for low precision and in it, through ``quantize_``: QATConfig; int8 products; int8 and ternary weights."""

from __future__ import annotations

from lowbit.training.bitnet import BitNetLinear, BitNetTrainingConfig
from lowbit.training.int8_linear import Int8MixedPrecisionLinear
from lowbit.training.int8_mixed_precision import Int8MixedPrecisionTrainingConfig
from lowbit.training.int8_weight_linear import Int8WeightLinear
from lowbit.training.int8_weight_only import Int8WeightOnlyQuantizedTrainingConfig
from lowbit.training.layers import FakeQuantizedEmbedding, FakeQuantizedLinear
from lowbit.training.qat import QATConfig

__all__ = [
    "BitNetLinear",
    "BitNetTrainingConfig",
    "FakeQuantizedEmbedding",
    "FakeQuantizedLinear",
    "Int8MixedPrecisionLinear",
    "Int8MixedPrecisionTrainingConfig",
    "Int8WeightLinear",
    "Int8WeightOnlyQuantizedTrainingConfig",
    "QATConfig",
]
