# SPDX-License-Identifier: Apache-2.0
"""torchao: refuse packed layers in ``convert_to_float8_training``, which accelerate's ``mixed_precision="fp8"`` also
calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torchao.float8 import float8_linear_utils

from lowbit.huggingface.refused import refuse_packed_layers


def _reads(name: str, layer: nn.Module, given: Mapping[str, Any]) -> bool:
    return given["module_filter_fn"] is None or bool(given["module_filter_fn"](layer, name))


refuse_packed_layers(
    float8_linear_utils, "convert_to_float8_training", _reads, "module_filter_fn can leave packed layers out"
)
