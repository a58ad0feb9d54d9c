# SPDX-License-Identifier: Apache-2.0
"""Errors for forward-mode derivatives (torch.func.jvp, jacfwd, torch.autograd.forward_ad) of ops that do not have one.

An op only reads the values of a tensor, so without an error the tangent would be lost silently. While torch computes
forward-mode derivatives, ``forward_ad._current_level`` is at least 0; otherwise it is -1. Reading this Python variable
is cheap.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def refuse_tangents(op: str, tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Return the tensors, with floating ones as views that raise an error if they have a tangent.

    Raises:
        NotImplementedError: a tensor has a tangent.
    """
    if torch.compiler.is_dynamo_compiling():  # Dynamo would ignore the jvp of `_WithoutTangent`
        torch._dynamo.graph_break(msg=f"{op}: forward mode is left to eager mode, which refuses tangents")
    return [
        tensor if tensor is None or not tensor.is_floating_point() else _WithoutTangent.apply(tensor, op)
        for tensor in tensors
    ]


class _WithoutTangent(torch.autograd.Function):
    """The identity, with an error in forward mode. A Function also sees tangents inside the wrappers of torch.func."""

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
