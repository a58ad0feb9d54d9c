# SPDX-License-Identifier: Apache-2.0
"""Training models for low precision: QATConfig, for quantization-aware training through ``quantize_``, and
in it: convert_to_float8_training."""

from __future__ import annotations

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
from lowbit.training.layers import FakeQuantizedEmbedding, FakeQuantizedLinear
from lowbit.training.qat import QATConfig

__all__ = [
    "CastConfig",
    "FakeQuantizedEmbedding",
    "FakeQuantizedLinear",
    "Float8GemmConfig",
    "Float8Linear",
    "Float8LinearConfig",
    "Float8LinearRecipeName",
    "QATConfig",
    "ScalingGranularity",
    "ScalingType",
    "convert_to_float8_training",
    "end_float8_training",
]
