# SPDX-License-Identifier: Apache-2.0
"""Training models for low precision: QATConfig, for quantization-aware training through ``quantize_``."""

from __future__ import annotations

from lowbit.training.layers import FakeQuantizedEmbedding, FakeQuantizedLinear
from lowbit.training.qat import QATConfig

__all__ = ["FakeQuantizedEmbedding", "FakeQuantizedLinear", "QATConfig"]
