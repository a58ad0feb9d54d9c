# SPDX-License-Identifier: Apache-2.0
"""Quantization of models: quantize_ and dequantize_, the packed layers, the report, calibration, loading of quantized
state dicts, fused MLPs, and peft's adapters on packed layers."""

from __future__ import annotations

from lowbit.quant.block_sparse import BlockSparseLinear
from lowbit.quant.calibration import Calibration, calibrate
from lowbit.quant.dequantize import dequantize_
from lowbit.quant.gated_mlp import fuse_gated_mlps
from lowbit.quant.input_moments import InputMoments
from lowbit.quant.layout import repack
from lowbit.quant.load import load
from lowbit.quant.merge_report import MergeReport, MergeRow
from lowbit.quant.merging import merging
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
    "MergeReport",
    "MergeRow",
    "QuantEmbedding",
    "QuantExperts",
    "QuantLinear",
    "QuantizationReport",
    "ReportRow",
    "calibrate",
    "dequantize_",
    "fuse_gated_mlps",
    "load",
    "merging",
    "quantize_",
    "repack",
    "sparsify_",
]
