# SPDX-License-Identifier: Apache-2.0
"""Quantizing models: quantize_, dequantize_, the layer between them, the report; load, fuse_gated_mlps,
adapters of peft."""

from __future__ import annotations

from lowbit.quant.block_sparse import BlockSparseLinear
from lowbit.quant.calibration import Calibration, calibrate
from lowbit.quant.dequantize import dequantize_
from lowbit.quant.gated_mlp import fuse_gated_mlps
from lowbit.quant.input_moments import InputMoments
from lowbit.quant.layout import repack
from lowbit.quant.load import load
from lowbit.quant.quant_embedding import QuantEmbedding
from lowbit.quant.quant_experts import QuantExperts
from lowbit.quant.quant_linear import QuantLinear
from lowbit.quant.quantize import quantize_
from lowbit.quant.report import FloatWeight, QuantizationReport, ReportRow
from lowbit.quant.sparsify import sparsify_

__all__ = [
    "BlockSparseLinear",
    "Calibration",
    "FloatWeight",
    "InputMoments",
    "QuantEmbedding",
    "QuantExperts",
    "QuantLinear",
    "QuantizationReport",
    "ReportRow",
    "calibrate",
    "dequantize_",
    "fuse_gated_mlps",
    "load",
    "quantize_",
    "repack",
    "sparsify_",
]
