# SPDX-License-Identifier: Apache-2.0
"""Some rows of a packed weight are those of the whole decoded weight, in every format, wherever they begin and end."""

from __future__ import annotations

import torch
from torch import nn

import lowbit
from lowbit.ops.decoded_rows import decoded_rows


def test_rows_are_those_of_the_decoded_weight(config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 83))
    lowbit.quantize_(model, config)
    layer = model[0]
    for dtype in (torch.float32, torch.bfloat16):
        whole, like = layer.dequantize(dtype), torch.empty(0, dtype=dtype)
        for start, stop in ((0, 83), (0, 16), (16, 48), (5, 6), (15, 33), (70, 83), (83, 83)):
            rows = decoded_rows(layer.weight, layer.op_args[:-1], start, stop, like)
            assert rows.dtype is dtype and torch.equal(rows, whole[start:stop])
