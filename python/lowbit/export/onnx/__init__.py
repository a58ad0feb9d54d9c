# SPDX-License-Identifier: Apache-2.0
"""ONNX: export a quantized model as a file that onnxruntime runs."""

from __future__ import annotations

from lowbit.export.onnx.exporting import export

__all__ = ["export"]
