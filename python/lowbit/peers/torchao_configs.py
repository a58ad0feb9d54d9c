# SPDX-License-Identifier: Apache-2.0
"""``torchao.quantize_(model, lowbit.Int4WeightOnlyConfig())``: torchao's own function with our configurations.

Importing this module makes our configurations count as torchao's (AOBaseConfig) and registers how a module is turned
into a QuantLinear; lowbit does so itself when torchao's quantize_ is imported (when_imported.py).
"""

from __future__ import annotations

from torch import nn
from torchao.core.config import AOBaseConfig
from torchao.quantization.transform_module import register_quantize_module_handler

from lowbit.formats import FORMATS, FormatConfig
from lowbit.quant.quantize import quantize_


def _quantize_module(module: nn.Module, config: FormatConfig) -> nn.Module:
    quantize_(module, config, lambda _, name: name == "")
    return module


for _cls in FORMATS:
    AOBaseConfig.register(_cls)
    register_quantize_module_handler(_cls)(_quantize_module)
