# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with weights in float8_e4m3fn: quant_method "fp8" (DeepSeek, Qwen3, AutoFP8) and "fbgemm_fp8" (Llama).

weight            float8_e4m3fn [n, k]
weight_scale_inv  float32 or e8m0, one per block of ``weight_block_size``, which multiplies in spite of its name
weight_scale      float32, one number; fbgemm: one per row, [n, 1]
input_scale       one number, of the activations, if ``activation_scheme`` is static
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowbit.checkpoints.methods.method import CONFIG, LayerCodes, LayerTensors, Method, float8_codes, scale_of_blocks

_BLOCKS, _WHOLE = ".weight_scale_inv", ".weight_scale"


class FP8Method(Method):
    """Reader of float8 weights with a scale per block, or one per weight."""

    name = "fp8"
    parts = (".weight", _BLOCKS, _WHOLE, ".input_scale", ".activation_scale")
    marks = (_BLOCKS, _WHOLE)
    ignored = (".k_scale", ".v_scale", ".q_scale")

    def __init__(self, settings: Mapping[str, Any], activations: str | None) -> None:
        super().__init__(settings, activations)
        self.block = settings.get("weight_block_size")
        if self.block is not None and not (
            isinstance(self.block, list)
            and len(self.block) == 2
            and all(type(one) is int and one > 0 for one in self.block)
        ):
            raise ValueError(f"{CONFIG}: weight_block_size of fp8 must be two numbers or null, got {self.block!r}")
        self.setting("expert_dtype", "fp8", "fp8", None)
        scheme = self.setting("activation_scheme", "dynamic", "dynamic", "static")
        if scheme == "static" and activations is None:
            raise ValueError(
                f"{CONFIG}: activation_scheme of fp8 must be 'dynamic', got 'static', a fixed scale of activations; "
                "LowbitConfig('checkpoint', activations='float') is without it"
            )

    def read(self, layer: LayerTensors) -> LayerCodes:
        part = _BLOCKS if _BLOCKS in layer else _WHOLE
        rows, columns = self.block or (layer.n, layer.k)
        codes = float8_codes(layer, ".weight")
        scale = scale_of_blocks(layer, part, min(rows, layer.n), min(columns, layer.k))
        # DeepSeek's kernels round activations by groups of 128; lowbit leaves them, which is closer to the float model.
        meant = "float" if self.block else "float8_row"
        return self.codes(codes, scale, None, "fp8_e4m3", columns, layer, meant=meant)


class FbgemmFP8Method(Method):
    """Reader of float8 weights with a scale per row. The upper bound of the scales of activations is not applied."""

    name = "fbgemm_fp8"
    parts = (".weight", ".weight_scale", ".input_scale_ub")
    marks = (".weight_scale",)

    def read(self, layer: LayerTensors) -> LayerCodes:
        scale = scale_of_blocks(layer, ".weight_scale", 1, layer.k)
        return self.codes(float8_codes(layer, ".weight"), scale, None, "fp8_e4m3", layer.k, layer, meant="float8_row")
