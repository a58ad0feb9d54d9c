# SPDX-License-Identifier: Apache-2.0
"""Forward-mode derivatives (torch.func.jvp, jacfwd, torch.autograd.forward_ad) where we have no formula: an op of ours
reads the numbers of a tensor alone, so that its tangent would be lost without an error.

torch computes such a derivative inside a level, which it keeps in Python: ``forward_ad._current_level``, -1 outside.
Reading it takes some nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def refuse_tangents(op: str, tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Return the tensors, floating ones as views that let no tangent through.

    Raises:
        NotImplementedError: a tensor has a tangent.
    """
    if torch.compiler.is_dynamo_compiling():  # it would trace `_WithoutTangent` without its jvp
        torch._dynamo.graph_break(msg=f"{op}: forward mode is left to eager mode, which refuses tangents")
    return [
        tensor if tensor is None or not tensor.is_floating_point() else _WithoutTangent.apply(tensor, op)
        for tensor in tensors
    ]


class _WithoutTangent(torch.autograd.Function):
    """The identity in all but forward mode. A Function sees tangents below the wrappers of torch.func too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, op: str) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.op = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        raise NotImplementedError(f"{ctx.op}: no forward-mode derivative (torch.func.jvp, jacfwd, forward_ad)")
