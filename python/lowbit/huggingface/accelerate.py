# SPDX-License-Identifier: Apache-2.0
"""accelerate: refuse conversions of packed layers to layers of bitsandbytes or Transformer Engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate.utils import bnb, transformer_engine
from torch import nn

from lowbit.huggingface.refused import refuse_packed_layers

_INSTEAD = "lowbit.dequantize_(model) makes the model float"


def _for_bitsandbytes(name: str, layer: nn.Module, given: Mapping[str, Any]) -> bool:
    left = given["modules_to_not_convert"] or ()
    return name.rpartition(".")[2] not in left and not any(part == name or f"{part}." in name for part in left)


def _for_transformer_engine(name: str, layer: nn.Module, given: Mapping[str, Any]) -> bool:
    return given["to_transformer_engine"] and given["_convert_linear"]


refuse_packed_layers(bnb, "replace_with_bnb_layers", _for_bitsandbytes, _INSTEAD)
refuse_packed_layers(transformer_engine, "convert_model", _for_transformer_engine, _INSTEAD)
