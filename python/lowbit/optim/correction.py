# SPDX-License-Identifier: Apache-2.0
"""Corrections of bfloat16 parameters (``master="bf16+8"``), as entries of the state.

A parameter and its correction, int8, are the leading 24 bits of a float32. The bits of the whole are those of the
parameter, as a float32, plus 256 times the correction. So it counts 256ths of the distance to the neighbouring bfloat16
value, and 0 changes nothing (csrc/cpu/optim/correction.hpp). The idea is FlashOptim's (arXiv 2602.23349).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.optim import sharding
from lowbit.optim.state_format import Layout

NAME = "correction"


def prepare(param: Tensor, state: dict[str, Any], layout: Layout, *, wanted: bool, is_reordered: bool) -> None:
    """Create the correction in the state of a parameter, bring it into the memory order of ``layout`` if that changed,
    or remove it if it is not wanted."""
    kept = state.pop(NAME, None)
    if not wanted:
        return
    if kept is None:
        kept = sharding.like(param, layout.empty(torch.int8).zero_())
    elif is_reordered:
        kept = sharding.like(param, layout.empty(torch.int8).copy_(sharding.local(kept)))
    state[NAME] = kept


def whole(param: Tensor, correction: Tensor) -> Tensor:
    """Return the float32 values of local bfloat16 parameters with their corrections."""
    bits = param.detach().float().view(torch.int32)
    corrected = bits + correction.int() * 256
    return torch.where(bits ^ corrected < 0, bits, corrected).view(torch.float32)  # zero with an old correction
