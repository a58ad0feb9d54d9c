# SPDX-License-Identifier: Apache-2.0
"""Quantizing models: quantize_, the layer it makes, and the report it returns."""

from __future__ import annotations

from lowbit.quant.quant_linear import QuantLinear
from lowbit.quant.quantize import quantize_
from lowbit.quant.report import QuantizationReport, ReportRow

__all__ = ["QuantLinear", "QuantizationReport", "ReportRow", "quantize_"]
