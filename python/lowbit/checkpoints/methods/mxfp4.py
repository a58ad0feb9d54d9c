# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of gpt-oss: quant_method "mxfp4", whose experts have e2m1 codes with a power of two for 32 of them.

gate_up_proj_blocks  uint8 [experts, n, k / 32, 16]   rows of gate and up in turns
gate_up_proj_scales  uint8 [experts, n, k / 32]       e8m0
"""

from __future__ import annotations

import torch

from lowbit.checkpoints.methods.fp4 import mxfp4_packed, powers
from lowbit.checkpoints.methods.method import LayerCodes, LayerTensors, Method

_BLOCK = 32


class MXFP4Method(Method):
    """Reader of the experts of gpt-oss."""

    name = "mxfp4"
    parts = ("_blocks", "_scales")
    marks = ("_blocks",)
    of_weight = ""

    def read(self, layer: LayerTensors) -> LayerCodes:
        experts, n, k = layer.weight.experts, layer.n, layer.k
        blocks = layer.read("_blocks", (experts or 1, n, k // _BLOCK, _BLOCK // 2), torch.uint8)
        power = powers(layer, "_scales", (experts or 1, n, k // _BLOCK))
        rows = torch.arange(n).view(-1, 2).T.flatten() if layer.weight.interleaved else None
        if experts is None:
            blocks, power = blocks[0], power[0]
        return mxfp4_packed(self, blocks, power, rows)
