# SPDX-License-Identifier: Apache-2.0
"""Liger: refuse its fused loss for packed heads, because it multiplies by ``lm_head.weight``.

It runs on NVIDIA GPUs, and ``use_liger_kernel=True`` of transformers' Trainer enables it by default. TRL's trainers
turn it off and have their own fused head (trl.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from liger_kernel.transformers import monkey_patch
from torch import nn

from lowbit.huggingface.refused import refuse_packed_layers

_HEADS = ("lm_head", "embed_out")
_INSTEAD = (
    'give liger_kernel_config={"fused_linear_cross_entropy": False}, or leave the head float (LowbitConfig(head=None), '
    "filter_fn of quantize_)"
)


def _reads(name: str, layer: nn.Module, given: Mapping[str, Any]) -> bool:
    return name.rpartition(".")[2] in _HEADS and given.get("fused_linear_cross_entropy", True)


refuse_packed_layers(monkey_patch, "_apply_liger_kernel_to_instance", _reads, _INSTEAD)
