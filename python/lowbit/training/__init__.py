# SPDX-License-Identifier: Apache-2.0
"""Training models for low precision and in it, through ``quantize_``: QATConfig, and training with int8 products."""

from __future__ import annotations

from lowbit.training.int8_linear import Int8MixedPrecisionLinear
from lowbit.training.int8_mixed_precision import Int8MixedPrecisionTrainingConfig
from lowbit.training.layers import FakeQuantizedEmbedding, FakeQuantizedLinear
from lowbit.training.qat import QATConfig

__all__ = [
    "FakeQuantizedEmbedding",
    "FakeQuantizedLinear",
    "Int8MixedPrecisionLinear",
    "Int8MixedPrecisionTrainingConfig",
    "QATConfig",
]
