# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of BitNet b1.58: quant_method "bitnet", ternary weights with one scale.

weight        uint8 [n / 4, k]: bits 2 i and 2 i + 1 of row r are the weight of row i * n / 4 + r, plus 1
weight_scale  one number: AutoBitLinear multiplies by it, BitLinear divides
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lowbit.checkpoints.methods.method import LayerCodes, LayerTensors, Method

_IN_A_BYTE = 4


class BitNetMethod(Method):
    """Reader of BitNet's packed layers, with activations of int8 per token."""

    name = "bitnet"
    parts = (".weight", ".weight_scale")
    marks = (".weight_scale",)

    def __init__(self, settings: Mapping[str, Any], activations: str | None) -> None:
        super().__init__(settings, activations)
        self.divides = self.setting("linear_class", "bitlinear", "bitlinear", "autobitlinear") == "bitlinear"
        self.setting("quantization_mode", "offline", "offline")
        self.setting("use_rms_norm", False, False, None)

    def read(self, layer: LayerTensors) -> LayerCodes:
        n, k = layer.n, layer.k
        if n % _IN_A_BYTE:
            raise ValueError(f"{layer.name}: n must be a multiple of {_IN_A_BYTE}, got n={n}")
        packed = layer.read(".weight", (n // _IN_A_BYTE, k), torch.uint8)
        scale = layer.scales(".weight_scale")
        if scale.numel() != 1 or (self.divides and not scale.all()):
            raise layer.error(".weight_scale", "one number, not 0 where it divides", str(scale.tolist()))
        codes = torch.cat([packed >> 2 * part & 3 for part in range(_IN_A_BYTE)])
        if (codes == 3).any():
            raise layer.error(".weight", "fields of 0, 1 or 2", "3")
        one = (1 / scale.double() if self.divides else scale.double()).float().reshape(1, 1)
        return self.codes(codes + 1, one.repeat(n, 1), None, "int2", k, layer, meant="int8_row")
