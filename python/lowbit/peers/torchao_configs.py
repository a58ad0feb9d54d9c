# SPDX-License-Identifier: Apache-2.0
"""``torchao.quantize_(model, lowbit.Int4WeightOnlyConfig())``: torchao's own function with lowbit's configurations.

Importing this module registers lowbit's configurations as torchao's (AOBaseConfig), with a handler that turns a module
into a QuantLinear. lowbit does so when torchao's quantize_ is imported (when_imported.py).
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
