# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of GPTQ (AutoGPTQ, GPTQModel): quant_method "gptq".

    qweight  int32 [k * bits / 32, n]        codes, a stream of bits along k in each column
    qzeros   int32 [groups, n * bits / 32]   zero points, a stream along n; version 1 stores them minus 1, see `_plus_one`
    scales   float16 [groups, n]
    g_idx    int32 [k]                       the group of each input; with act order in any order

The stream of a column of ``qweight`` is that of a row of lowbit's weight, so the words are transposed and nothing is
unpacked, unless act order permutes the inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowbit.checkpoints.methods.method import CONFIG, LayerCodes, LayerTensors, Method, inputs_by_group
from lowbit.quant.codes import codes_of

_VERSION = "checkpoint_format"  # GPTQModel also writes it as "format", transformers reads both


class GPTQMethod(Method):
    """Reader of GPTQ's layers of 2, 3, 4 and 8 bits. GPTQModel packs 5, 6 and 7 bits in planes, which are not read."""

    name = "gptq"
    parts = (".qweight", ".qzeros", ".scales", ".g_idx")
    marks = (".qweight",)
    widths: ClassVar[tuple[int, ...]] = (2, 3, 4, 8)
    """The numbers of bits that a layer may have."""

    def __init__(self, settings: Mapping[str, Any], activations: str | None) -> None:
        told = {str(settings[name]).lower() for name in (_VERSION, "format") if settings.get(name) is not None}
        if len(told) > 1:
            raise ValueError(
                f"{CONFIG}: {_VERSION} and format of {self.name} must be the same, got {settings[_VERSION]!r} and "
                f"{settings['format']!r}"
            )
        super().__init__({**settings, _VERSION: next(iter(told), None)}, activations)
        self.is_first = self.setting(_VERSION, None, "gptq", "gptq_v2", None) != "gptq_v2"
        self.by_layer = bool(settings.get("dynamic"))  # then shapes alone say bits and groups
        if not self.by_layer:
            self.setting("bits", None, *self.widths)
            self.group_size()

    def group_size(self) -> int:
        """The group size that the settings name; -1 is a whole row."""
        size = self.settings.get("group_size", 128)
        if type(size) is not int or size == 0 or size < -1:
            raise ValueError(f"{CONFIG}: group_size of {self.name} must be -1 or a positive number, got {size!r}")
        return size

    def read(self, layer: LayerTensors) -> LayerCodes:
        n, k = layer.n, layer.k
        bits = self._bits(layer)
        words = layer.read(".qweight", (k * bits // 32, n), torch.int32)
        stream = words.t().contiguous().view(torch.uint8)
        scale = layer.scales(".scales")
        group, groups = self._group(layer, scale)
        zeros = layer.read(".qzeros", (groups, n * bits // 32), torch.int32)
        zero = self.plus_one(zeros, n, bits) if self.is_first else codes_of(zeros.view(torch.uint8), n, bits)
        permutation = inputs_by_group(layer, ".g_idx", group)
        codes = stream if permutation is None else codes_of(stream, k, bits)[:, permutation]
        scale, zero = scale.t().contiguous(), zero.t().contiguous()
        return self.codes(codes, scale, zero, f"int{bits}", group, layer, permutation=permutation)

    def plus_one(self, words: Tensor, n: int, bits: int) -> Tensor:
        """Return the zero points of version 1, ``[groups, n]``, as its writer GPTQModel reads them.

        It subtracts 1 from all fields of a word in one subtraction, in which a zero point of 0 borrows from the next
        one, and adds 1 in the same way; with 3 bits, whose fields cross words, it wraps each field.
        """
        if bits == 3:
            return codes_of(words.view(torch.uint8), n, bits) + 1 & 7
        ones = sum(1 << shift for shift in range(0, 32, bits))
        return codes_of((words + ones).view(torch.uint8), n, bits)

    def _bits(self, layer: LayerTensors) -> int:
        shape = layer.shape(".qweight")
        bits = shape[0] * 32 / layer.k if len(shape) == 2 else 0
        wanted = self.widths if self.by_layer else (self.settings["bits"],)
        if bits not in wanted or layer.k * bits % 32 or layer.n * bits % 32:
            rows = " or ".join(f"{layer.k * each / 32:g}" for each in wanted)
            raise layer.error(
                ".qweight",
                f"int32 [{rows}, {layer.n}] for {' or '.join(map(str, wanted))} bits of k={layer.k} in whole words",
                str(list(shape)),
            )
        return int(bits)

    def _group(self, layer: LayerTensors, scale: Tensor) -> tuple[int, int]:
        """Return the width of a group and their number."""
        size = self.group_size()
        group = layer.k if size == -1 else min(size, layer.k)
        if self.by_layer and scale.dim() == 2 and scale.shape[0]:
            group = -(-layer.k // scale.shape[0])
        groups = -(-layer.k // group)
        if tuple(scale.shape) != (groups, layer.n):
            raise layer.error(".scales", f"{[groups, layer.n]} for groups of {group}", str(list(scale.shape)))
        return group, groups
