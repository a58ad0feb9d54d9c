# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of AutoRound: quant_method "auto-round".

Layers are packed as those of GPTQ or AWQ; ``packing_format`` says how. Shapes say bits and groups of each layer, of
which ``extra_config`` may give one others than the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit.checkpoints.methods.awq import AWQMethod
from lowbit.checkpoints.methods.gptq import GPTQMethod
from lowbit.checkpoints.methods.method import CONFIG, LayerCodes, LayerTensors, Method
from lowbit.quant.codes import codes_of

_GPTQ = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
}
_AWQ = ("auto_round:auto_awq", "auto_round:awq")


class _Streams(GPTQMethod):
    """GPTQ's packing as AutoRound has it: a stream of any number of bits, and zero points of version 1 one by one."""

    name = "auto-round"
    widths = (2, 3, 4, 5, 6, 7, 8)

    def plus_one(self, words: Tensor, n: int, bits: int) -> Tensor:
        return codes_of(words.view(torch.uint8), n, bits).to(torch.int16) + 1


class AutoRoundMethod(Method):
    """Reader of AutoRound's layers of integers."""

    name = "auto-round"
    parts = GPTQMethod.parts
    marks = GPTQMethod.marks

    def __init__(self, settings: Mapping[str, Any], activations: str | None) -> None:
        super().__init__(settings, activations)
        packing = settings.get("packing_format", "auto_round:auto_gptq")
        if settings.get("data_type", "int") != "int" or settings.get("act_bits", 16) not in (16, 32, None):
            raise ValueError(
                f"{CONFIG}: data_type of auto-round must be 'int' with float activations, got "
                f"{settings.get('data_type')!r} with act_bits={settings.get('act_bits')!r}"
            )
        of_layers = {**settings, "dynamic": True, "format": None}
        if packing in _AWQ:
            self.packing: Method = AWQMethod(settings, activations)
        elif packing in _GPTQ:
            self.packing = _Streams({**of_layers, "checkpoint_format": _GPTQ[packing]}, activations)
        else:
            raise ValueError(
                f"{CONFIG}: packing_format of auto-round must be one of {', '.join([*_GPTQ, *_AWQ])}, got {packing!r}"
            )

    def read(self, layer: LayerTensors) -> LayerCodes:
        return self.packing.read(layer)
