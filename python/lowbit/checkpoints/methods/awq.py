# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of AWQ (AutoAWQ, llm-awq): quant_method "awq", 4 bits.

Version "gemm":
    qweight  int32 [k, n / 8]        codes of 8 neighbouring columns; nibble i is that of column GEMM[i]
    qzeros   int32 [groups, n / 8]   zero points, in the same order
    scales   float16 [groups, n]

Version "gemv":
    qweight  int32 [n, k / 8]        codes along k, in order
    qzeros   int32 [n, width / 8]    zero points along groups, in order
    scales   float16 [n, width]      both padded: ``width`` is a multiple of 8, or of 16 or 32 for groups of 64 or 32
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit.checkpoints.methods.method import CONFIG, LayerCodes, LayerTensors, Method
from lowbit.quant.codes import codes_of

GEMM = (0, 2, 4, 6, 1, 3, 5, 7)
WORD = 8  # codes in a word


class AWQMethod(Method):
    """Reader of AWQ's layers in the packings of its kernels "gemm" and "gemv"."""

    name = "awq"
    parts = (".qweight", ".qzeros", ".scales")
    marks = (".qweight",)

    def __init__(self, settings: Mapping[str, Any], activations: str | None) -> None:
        super().__init__(settings, activations)
        version = settings.get("version") or settings.get("format") or "gemm"  # GPTQModel writes "format"
        version = "llm-awq" if settings.get("backend") == "llm-awq" else version
        self.settings = {**settings, "version": version.lower() if isinstance(version, str) else version}
        self.version = self.setting("version", "gemm", "gemm", "gemv")
        self.setting("bits" if "bits" in settings else "w_bit", 4, 4)
        self.group_size = settings.get("group_size", settings.get("q_group_size", 128))
        if type(self.group_size) is not int or self.group_size == 0 or self.group_size < -1:
            raise ValueError(f"{CONFIG}: group_size of awq must be -1 or a positive number, got {self.group_size!r}")

    def read(self, layer: LayerTensors) -> LayerCodes:
        group = layer.k if self.group_size == -1 else min(self.group_size, layer.k)
        if layer.k % group or layer.k % WORD or layer.n % WORD:
            raise ValueError(
                f"{layer.name}: n and k must be multiples of 8, and k of the group size {group}, got n={layer.n} "
                f"k={layer.k}"
            )
        codes, scale, zero = (_gemm if self.version == "gemm" else _gemv)(layer, group)
        return self.codes(codes, scale, zero, "int4", group, layer)


def _gemm(layer: LayerTensors, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes ``[n, k]``, scales and zero points ``[n, groups]``."""
    groups, words = layer.k // group, layer.n // WORD
    codes = columns_in_order(layer.read(".qweight", (layer.k, words), torch.int32))
    zero = columns_in_order(layer.read(".qzeros", (groups, words), torch.int32))
    scale = layer.scales(".scales", (groups, layer.n)).t().contiguous()
    return codes.t().contiguous(), scale, zero.t().contiguous()


def columns_in_order(words: Tensor) -> Tensor:
    """Return the codes of words in the order of their columns, uint8 ``[rows, columns]``."""
    nibbles = codes_of(words.view(torch.uint8), words.shape[1] * WORD, 4).view(len(words), -1, WORD)
    order = torch.tensor(GEMM).argsort()
    return nibbles[:, :, order].flatten(1)


def _gemv(layer: LayerTensors, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a stream of codes, and scales and zero points ``[n, groups]``."""
    groups = layer.k // group
    padded = WORD * {64: 2, 32: 4}.get(group, 1)
    width = -(-groups // padded) * padded
    stream = layer.read(".qweight", (layer.n, layer.k // WORD), torch.int32).view(torch.uint8)
    zeros = layer.read(".qzeros", (layer.n, width // WORD), torch.int32).view(torch.uint8)
    scale = layer.scales(".scales", (layer.n, width))[:, :groups].contiguous()
    return stream, scale, codes_of(zeros, width, 4)[:, :groups].contiguous()
