# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of NVIDIA's ModelOpt: quant_method "modelopt", whose ``quant_algo`` says what the codes are.

NVFP4  weight uint8 [n, k / 2], weight_scale float8_e4m3fn [n, k / 16], weight_scale_2 float32: e2m1 * both
FP8    weight float8_e4m3fn [n, k], weight_scale float32, one number
input_scale  one number, the fixed scale of activations
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowbit.checkpoints.methods.fp4 import nvfp4_codes
from lowbit.checkpoints.methods.method import CONFIG, LayerCodes, LayerTensors, Method, float8_codes, scale_of_blocks


class ModelOptMethod(Method):
    """Reader of ModelOpt's NVFP4 and FP8 layers."""

    name = "modelopt"
    parts = (".weight", ".weight_scale", ".weight_scale_2", ".input_scale")
    marks = (".weight_scale",)
    ignored = (".k_scale", ".v_scale", ".q_scale", ".output_scale")

    def __init__(self, settings: Mapping[str, Any], activations: str | None) -> None:
        super().__init__(settings, activations)
        self.algorithm = self.setting("quant_algo", "NVFP4", "NVFP4", "FP8")
        if self.algorithm == "FP8" and activations is None:
            raise ValueError(
                f"{CONFIG}: quant_algo of modelopt must be 'NVFP4', got 'FP8', whose activations have a fixed scale; "
                "LowbitConfig('checkpoint', activations='float') is without it"
            )

    def read(self, layer: LayerTensors) -> LayerCodes:
        if self.algorithm == "NVFP4":
            whole = layer.scales(".weight_scale_2")
            if whole.numel() != 1:
                raise layer.error(".weight_scale_2", "one number", str(list(whole.shape)))
            return nvfp4_codes(self, layer, ".weight", ".weight_scale", whole)
        scale = scale_of_blocks(layer, ".weight_scale", layer.n, layer.k)
        return self.codes(float8_codes(layer, ".weight"), scale, None, "fp8_e4m3", layer.k, layer)
