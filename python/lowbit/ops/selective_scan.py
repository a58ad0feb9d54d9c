# SPDX-License-Identifier: Apache-2.0
"""The selective scan of Mamba-1, with a state h per channel, each number of which decays with a speed of its own:

h = exp(delta_t A) h + delta_t x_t B_t;    y_t = (C_t . h + D x_t) silu(z_t)
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowbit.ops.derivatives import is_differentiated, is_recorded, refuse_derivatives
from lowbit.ops.forward_mode import refuse_tangents
from lowbit.ops.registration import function_of, register
from lowbit.ops.selective_scan_backward import states_like

register()
_call, _in_place = function_of("selective_scan"), function_of("selective_scan_")
_backward = function_of("selective_scan_backward")
_Results = tuple[Tensor, Tensor]


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    *,
    dt_bias: Tensor | None = None,
    softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    state: Tensor | None = None,
    in_place: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the selective scan of Mamba-1, which Mamba, Falcon-Mamba, Jamba and Zamba have.

    Each channel has a state h ``[S]``. A token lets it decay by ``exp(delta A)``, adds ``delta x B`` to it, and reads
    ``y = (C . h + D x) silu(z)``, where ``delta = clamp(softplus(dt + dt_bias), *dt_limit)``. Computed in float32; y is
    rounded once. Results do not depend on the number of threads. All tensors but cu_seqlens get gradients; the backward
    computes the states again, and needs memory for one of every 32 tokens.

    Args:
        x: ``[B, T, D]`` float32, bfloat16 or float16, any strides.
        dt: ``[B, T, D]``, any of the three dtypes, finite.
        A: ``[D, S]``, any of the three dtypes, finite and at most 0: ``-exp(A_log)`` of a layer of transformers.
        B, C: ``[B, T, S]``, dtype of x; or ``[B, T, G, S]``, where D is a multiple of G and each group serves D / G
            consecutive channels.
        D: ``[D]``, any of the three dtypes, a factor of x; None is zeros.
        z: ``[B, T, D]``, dtype of x, the gate; None is no gate.
        dt_bias: ``[D]``, any of the three dtypes, finite, added to dt; None is zeros.
        softplus: whether delta is made of ``log(1 + exp(dt + dt_bias))`` instead of ``dt + dt_bias``.
        dt_limit: the least and the largest delta, not negative. A token with delta = 0, or with x = 0 where the state is
            0, such as left padding, leaves the state as it is.
        state: float32 or bfloat16 ``[N, D, S]``, the state before the first token; None is zeros. N is B, or the number
            of packed sequences.
        in_place: whether the new state is written to ``state``, which must be contiguous. Otherwise it is not changed.
        cu_seqlens: int32 or int64 ``[N + 1]``, for B = 1: sequence n has the tokens ``cu_seqlens[n]`` to
            ``cu_seqlens[n + 1] - 1``.

    Returns:
        y ``[B, T, D]`` in the dtype of x, contiguous, and the state after the last token ``[N, D, S]``, in the dtype of
        ``state`` or float32: ``state`` itself if it is changed in place.

    Raises:
        ValueError: a shape does not fit, dt, dt_bias or A is not finite, A is positive, the limits are negative or not
            in order, cu_seqlens do not rise from 0 to T, or there is no state to be changed in place.
        TypeError: a dtype is not one of the above.
        NotImplementedError: no kernel row serves the device; a derivative is requested of a call that changes the state
            in place; or a second or forward-mode derivative or vmap is requested.

    Example:
        >>> y, state = lowbit.selective_scan(x, dt, A, B, C, D, z, dt_bias=bias, softplus=True)
        >>> y, state = lowbit.selective_scan(*token, D, z1, dt_bias=bias, softplus=True, state=state, in_place=True)
    """
    B, C = (tensor.unsqueeze(2) if tensor.dim() == 3 else tensor for tensor in (B, C))
    tensors, (least, most) = (x, dt, A, B, C, D, z, dt_bias, state), dt_limit
    if in_place:
        if state is None:
            raise ValueError("selective_scan: in_place=True wants a state to change, got None")
        if is_differentiated():
            refuse_derivatives("selective_scan with in_place=True", tensors)
        return _in_place(x, dt, A, B, C, state, least, most, D, z, dt_bias, softplus, cu_seqlens), state
    if forward_ad._current_level >= 0:  # the level is -1 outside forward mode
        refuse_tangents("selective_scan", tensors)
    run = _SelectiveScan.apply if is_recorded(tensors) else _call
    return run(x, dt, A, B, C, least, most, D, z, dt_bias, state, softplus, cu_seqlens)


def differentiated_selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    dt_min: float,
    dt_max: float,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor | None,
    softplus: bool,
    cu_seqlens: Tensor | None,
) -> _Results:
    """Compute `lowbit::selective_scan` with its gradient, for derivatives.py."""
    if forward_ad._current_level >= 0:
        refuse_tangents("selective_scan", (x, dt, A, B, C, D, z, dt_bias, state))
    return _SelectiveScan.apply(x, dt, A, B, C, dt_min, dt_max, D, z, dt_bias, state, softplus, cu_seqlens)


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        dt_min: float,
        dt_max: float,
        D: Tensor | None,
        z: Tensor | None,
        dt_bias: Tensor | None,
        state: Tensor | None,
        softplus: bool,
        cu_seqlens: Tensor | None,
    ) -> _Results:
        return _call(x, dt, A, B, C, dt_min, dt_max, D, z, dt_bias, state, softplus, cu_seqlens)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: _Results) -> None:
        x, dt, A, B, C, *ctx.limit, D, z, dt_bias, state, ctx.softplus, cu_seqlens = inputs
        ctx.save_for_backward(x, dt, A, B, C, D, z, dt_bias, state, cu_seqlens)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None, grad_state: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, cu_seqlens = ctx.saved_tensors
        if grad_y is None:
            grad_y = torch.zeros_like(tensors[0])
        if torch.is_grad_enabled():  # create_graph=True
            refuse_derivatives("the backward of selective_scan", (*tensors, grad_y, grad_state))
        grads = _backward(*tensors[:5], grad_y, *ctx.limit, *tensors[5:], grad_state, ctx.softplus, cu_seqlens)
        wanted = [*ctx.needs_input_grad[:5], *ctx.needs_input_grad[7:11]]
        found = [grad if needed else None for grad, needed in zip(grads, wanted, strict=True)]
        return *found[:5], None, None, *found[5:], None, None

    @staticmethod
    def vmap(*_: Any) -> NoReturn:
        raise NotImplementedError("selective_scan: no vmap; a batch is the first dimension of x")


def fake(x: Tensor, A: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, **_: Any) -> _Results:
    return x.new_empty(x.shape), states_like(x, A, state, cu_seqlens)
