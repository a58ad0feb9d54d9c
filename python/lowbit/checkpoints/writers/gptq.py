# SPDX-License-Identifier: Apache-2.0
"""Packed weights in the layout of GPTQ (methods/gptq.py), as vLLM, GPTQModel and transformers read it.

Version 1 stores zero points minus 1, and version 2 as they are. Symmetric models are written in version 1, which all
programs read, and others in version 2: GPTQModel 7.7 takes version 1 with zero points only from itself. A zero point of
2^bits, which AutoRound's files may have, is in neither: GPTQModel reads that of version 1 as 0.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit import _C
from lowbit.checkpoints.writers.writer import CodedLayer, Writer, holds, words

_BITS = (2, 3, 4, 8)


class GPTQWriter(Writer):
    """Writer of integers of 2, 3, 4 and 8 bits with float16 scales, also in act order."""

    name = "gptq"

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.forms: dict[str, tuple[int, int]] = {}  # bits and group size of each layer
        self.heads: set[str] = set()
        self.symmetric, self.act_order = True, False

    def add(self, layer: CodedLayer) -> None:
        self.check_integers(layer, _BITS)
        bits, group = layer.bits, self.group_size(layer)
        if layer.n * bits % 32 or layer.k * bits % 32:
            raise self.error(layer, f"rows and columns must fill words of 32 bits, got n={layer.n} k={layer.k}")
        if not holds(torch.float16, layer.scale):
            raise self.error(layer, "its scales are no float16")
        self.check_zero_points(layer, 2**bits - 1)
        self.forms[layer.name] = bits, group
        self.heads |= {layer.name} if layer.is_head else set()
        self.symmetric &= layer.coded.zero is None
        self.act_order |= layer.permutation is not None

    @property
    def version(self) -> int:
        return 1 if self.symmetric else 2

    def tensors(self, layer: CodedLayer) -> dict[str, Tensor]:
        bits, group, k = *self.forms[layer.name], layer.k
        stored = layer.zero_points() - (1 if self.version == 1 else 0)
        groups = (torch.arange(k, device=stored.device) // (k if group == -1 else group)).to(torch.int32)
        if layer.permutation is not None:
            groups = torch.empty_like(groups).index_copy_(0, layer.permutation, groups)
        return {
            ".qweight": words(layer.codes_of_inputs(), bits).t().contiguous(),
            ".qzeros": words(stored.t().contiguous(), bits),
            ".scales": layer.scale.half().t().contiguous(),
            ".g_idx": groups,
        }

    def settings(self, floats: Sequence[str]) -> dict[str, Any]:
        (bits, group), _ = Counter(self.forms.values()).most_common(1)[0]
        others = {name: form for name, form in self.forms.items() if form != (bits, group)}
        dynamic: dict[str, dict[str, int]] = {
            f"+:^{re.escape(name)}$": {"bits": form[0], "group_size": form[1]} for name, form in others.items()
        }
        dynamic |= {f"-:^{re.escape(name)}$": {} for name in floats}
        return {
            "quant_method": self.name,
            "bits": bits,
            "group_size": group,
            "sym": self.symmetric,
            "desc_act": self.act_order,
            "checkpoint_format": "gptq" if self.version == 1 else "gptq_v2",
            "pack_dtype": "int32",
            "lm_head": bool(self.heads),
            "meta": {"quantizer": [f"lowbit:{_C.version}"]},
        } | ({"dynamic": dynamic} if dynamic else {})
