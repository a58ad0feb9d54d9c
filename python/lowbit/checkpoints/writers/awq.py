# SPDX-License-Identifier: Apache-2.0
"""Packed weights in the layout of AWQ's kernel "gemm" (methods/awq.py), as vLLM and AutoAWQ read it. Zero points are
always stored; those of symmetric weights are 8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit.checkpoints.methods.awq import GEMM, WORD
from lowbit.checkpoints.writers.writer import CodedLayer, Writer, holds, words

_BITS = 4


class AWQWriter(Writer):
    """Writer of integers of 4 bits with float16 scales, in one group size for all layers."""

    name = "awq"

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.first: tuple[str, int] | None = None  # the first layer, and the group size of all

    def add(self, layer: CodedLayer) -> None:
        self.check_integers(layer, (_BITS,))
        group = self.group_size(layer)
        if layer.is_head:
            raise self.error(layer, "readers of awq have a float output head")
        if layer.permutation is not None:
            raise self.error(layer, "it reads its inputs in another order (act order)")
        if layer.n % WORD or layer.k % WORD:
            raise self.error(layer, f"n and k must be multiples of {WORD}, got n={layer.n} k={layer.k}")
        if not holds(torch.float16, layer.scale):
            raise self.error(layer, "its scales are no float16")
        self.check_zero_points(layer, 2**_BITS - 1)
        self.first = self.first or (layer.name, group)
        if group != self.first[1]:
            raise self.error(layer, f"all layers must have one group size, and {self.first[0]} has {self.first[1]}")

    def tensors(self, layer: CodedLayer) -> dict[str, Tensor]:
        return {
            ".qweight": _words(layer.coded.codes.t()),
            ".qzeros": _words(layer.zero_points().t()),
            ".scales": layer.scale.half().t().contiguous(),
        }

    def settings(self, floats: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": self.name,
            "bits": _BITS,
            "group_size": self.first[1],
            "version": "gemm",
            "zero_point": True,
            "modules_to_not_convert": [*floats] or None,
        }


def _words(codes: Tensor) -> Tensor:
    """Return words of 8 neighbouring columns in the order of the kernel."""
    order = torch.tensor(GEMM, device=codes.device)
    return words(codes.unflatten(1, (-1, WORD))[:, :, order].flatten(1), _BITS)
