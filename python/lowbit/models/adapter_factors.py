# SPDX-License-Identifier: Apache-2.0
"""The factors of LoRA as constants of a program: y = W x + B (A x), with the scaling in B.

The first factors of all layers that read one x are one packed weight, which is multiplied once; the second ones lie as
the op `linear` reads them, 16 outputs side by side. Factors whose numbers all have 16 bits are stored so, because a token
reads all of them: those of most files, since peft widens them to float32. All others stay float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lowbit.formats.spec import LinearSpec
from lowbit.ops.linear import LinearArgs
from lowbit.ops.program import LowRank, Program
from lowbit.quant.lora_layers import base_of, factors_of
from lowbit.quant.merged import PANEL
from lowbit.quant.packing import pack_weight


class Added(NamedTuple):
    """What an adapter adds to a layer of a program: ``inner[..., column:column + rank] @ up.T``."""

    inner: int
    """The operand of the product of x and the first factors."""
    column: int
    """-1: nothing is added; up is 0."""
    up: Tensor
    """``[n, rank]`` in float32."""


def factors_of_all(layers: Sequence[nn.Module]) -> tuple[Tensor | None, list[tuple[int, Tensor]]]:
    """Return the first factors of the adapters on these layers as one matrix ``[R, k]``, or None if there are none, and
    for each layer its column among the R results and its second factor ``[n, rank]``. All have the highest rank; what a
    layer lacks is 0. Several adapters of one layer are one of the sum of their ranks."""
    factors = [factors_of(layer) for layer in layers]
    rank = max(sum(len(down) for down, _, _ in of_layer) for of_layer in factors)
    downs, ups = [], []
    for layer, of_layer in zip(layers, factors, strict=True):
        base = base_of(layer)
        whole = torch.zeros(base.out_features, rank, device="cpu", dtype=torch.float32)
        ups.append((rank * len(downs) if of_layer else -1, whole))
        if not of_layer:
            continue
        downs.append(torch.zeros(rank, base.in_features, device="cpu", dtype=torch.float32))
        at = 0
        for down, up, scaling in of_layer:
            rows = slice(at, at := at + len(down))
            downs[-1][rows] = down.detach()
            whole[:, rows] = up.detach().float() * scaling
    return (torch.cat(downs) if downs else None), ups


def packed(down: Tensor) -> tuple[Tensor, LinearArgs]:
    """Return a first factor as a packed weight, with its format and size as the op takes them."""
    values = _in_16_bits(down)
    spec = LinearSpec(str(values.dtype).removeprefix("torch."))
    return pack_weight(values, spec)[0], spec.op_args(*values.shape)


def low_rank_of(program: Program, added: Sequence[Added | None]) -> LowRank | None:
    """Write the second factors of the parts of a product as one constant."""
    parts = [part for part in added if part is not None]
    inner = next((part.inner for part in parts if part.column >= 0), None)
    if inner is None:
        return None
    up, ends, end = _in_16_bits(torch.cat([part.up for part in parts])), [], 0
    for part in parts:
        end += len(part.up)
        ends.append((end, part.column))
    up = nn.functional.pad(up, (0, 0, 0, -len(up) % PANEL))
    panels = up.view(-1, PANEL, up.shape[1]).transpose(1, 2).contiguous()
    return LowRank(inner, program.constant(panels), tuple(ends))


def _in_16_bits(factor: Tensor) -> Tensor:
    """Return a float32 factor in 16 bits if that changes no number, else the factor itself."""
    for dtype in (torch.bfloat16, torch.float16):
        if factor.equal((narrow := factor.to(dtype)).float()):
            return narrow
    return factor
