# SPDX-License-Identifier: Apache-2.0
"""Quantizing models: quantize_, the layer it makes, the report it returns; fuse_gated_mlps for what follows."""

from __future__ import annotations

from lowbit.quant.gated_mlp import fuse_gated_mlps
from lowbit.quant.quant_linear import QuantLinear
from lowbit.quant.quantize import quantize_
from lowbit.quant.report import QuantizationReport, ReportRow

__all__ = ["QuantLinear", "QuantizationReport", "ReportRow", "fuse_gated_mlps", "quantize_"]
