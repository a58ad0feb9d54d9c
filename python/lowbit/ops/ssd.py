# SPDX-License-Identifier: Apache-2.0
"""The state space dual of Mamba-2, with a state h per head that decays and to which each token adds an outer product:

h = exp(delta_t A) h + delta_t x_t B_t^T;    y_t = h C_t + D x_t
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
from lowbit.ops.ssd_backward import states_like

register()
_call, _in_place, _backward = function_of("ssd"), function_of("ssd_"), function_of("ssd_backward")
_Results = tuple[Tensor, Tensor]


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    dt_bias: Tensor | None = None,
    softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    state: Tensor | None = None,
    in_place: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the state space dual (SSD) of Mamba-2, which Granite 4, Nemotron-H, Falcon-H1, Bamba and Zamba2 have.

    Each head has a state h ``[P, S]``. A token lets it decay by ``exp(delta A)``, adds ``delta x B^T`` to it, and reads
    ``y = h C + D x``, where ``delta = clamp(softplus(dt + dt_bias), *dt_limit)``. Computed in float32; y is rounded
    once. Results do not depend on the number of threads. x, dt, A, B, C, D, dt_bias and state get gradients; the
    backward computes the states again, and needs memory for one of every 120 tokens.

    Args:
        x: ``[B, T, H, P]`` float32, bfloat16 or float16, any strides.
        dt: ``[B, T, H]``, any of the three dtypes, finite.
        A: ``[H]``, any of the three dtypes, finite and at most 0: ``-exp(A_log)`` of a layer of transformers.
        B, C: ``[B, T, G, S]``, dtype of x; H is a multiple of G. Each group serves H / G consecutive heads.
        D: ``[H]``, any of the three dtypes, a factor of x; None is zeros.
        dt_bias: ``[H]``, any of the three dtypes, finite, added to dt; None is zeros.
        softplus: whether delta is made of ``log(1 + exp(dt + dt_bias))`` instead of ``dt + dt_bias``.
        dt_limit: the least and the largest delta, not negative. A token with delta = 0, such as left padding, leaves
            the state as it is.
        state: float32 or bfloat16 ``[N, H, P, S]``, the state before the first token; None is zeros. N is B, or the
            number of packed sequences.
        in_place: whether the new state is written to ``state``, which must be contiguous. Otherwise it is not changed.
        cu_seqlens: int32 or int64 ``[N + 1]``, for B = 1: sequence n has the tokens ``cu_seqlens[n]`` to
            ``cu_seqlens[n + 1] - 1``.

    Returns:
        y ``[B, T, H, P]`` in the dtype of x, contiguous, and the state after the last token ``[N, H, P, S]``, in the dtype
        of ``state`` or float32: ``state`` itself if it is changed in place.

    Raises:
        ValueError: a shape does not fit, dt, dt_bias or A is not finite, A is positive, the limits are negative or not
            in order, cu_seqlens do not rise from 0 to T, or there is no state to be changed in place.
        TypeError: a dtype is not one of the above.
        NotImplementedError: no kernel row serves the device; a derivative is requested of a call that changes the state
            in place; or a second or forward-mode derivative or vmap is requested.

    Example:
        >>> y, state = lowbit.ssd(x, dt, A, B, C, D, dt_bias=dt_bias, softplus=True)
        >>> y, state = lowbit.ssd(*next_token, D, dt_bias=dt_bias, softplus=True, state=state, in_place=True)
    """
    tensors, (least, most) = (x, dt, A, B, C, D, dt_bias, state), dt_limit
    if in_place:
        if state is None:
            raise ValueError("ssd: in_place=True wants a state to change, got None")
        if is_differentiated():
            refuse_derivatives("ssd with in_place=True", tensors)
        return _in_place(x, dt, A, B, C, state, least, most, D, dt_bias, softplus, cu_seqlens), state
    if forward_ad._current_level >= 0:  # the level is -1 outside forward mode
        refuse_tangents("ssd", tensors)
    if is_recorded(tensors):
        return _Ssd.apply(x, dt, A, B, C, least, most, D, dt_bias, state, softplus, cu_seqlens)
    return _call(x, dt, A, B, C, least, most, D, dt_bias, state, softplus, cu_seqlens)


def differentiated_ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    dt_min: float,
    dt_max: float,
    D: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor | None,
    softplus: bool,
    cu_seqlens: Tensor | None,
) -> _Results:
    """Compute `lowbit::ssd` with its gradient, for derivatives.py."""
    if forward_ad._current_level >= 0:
        refuse_tangents("ssd", (x, dt, A, B, C, D, dt_bias, state))
    return _Ssd.apply(x, dt, A, B, C, dt_min, dt_max, D, dt_bias, state, softplus, cu_seqlens)


class _Ssd(torch.autograd.Function):
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
        dt_bias: Tensor | None,
        state: Tensor | None,
        softplus: bool,
        cu_seqlens: Tensor | None,
    ) -> _Results:
        return _call(x, dt, A, B, C, dt_min, dt_max, D, dt_bias, state, softplus, cu_seqlens)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: _Results) -> None:
        x, dt, A, B, C, *ctx.limit, D, dt_bias, state, ctx.softplus, cu_seqlens = inputs
        ctx.save_for_backward(x, dt, A, B, C, D, dt_bias, state, cu_seqlens)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None, grad_state: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, cu_seqlens = ctx.saved_tensors
        if grad_y is None:
            grad_y = torch.zeros_like(tensors[0])
        if torch.is_grad_enabled():  # create_graph=True
            refuse_derivatives("the backward of ssd", (*tensors, grad_y, grad_state))
        grads = _backward(*tensors[:5], grad_y, *ctx.limit, *tensors[5:], grad_state, ctx.softplus, cu_seqlens)
        wanted = [*ctx.needs_input_grad[:5], *ctx.needs_input_grad[7:10]]
        found = [grad if needed else None for grad, needed in zip(grads, wanted, strict=True)]
        return *found[:5], None, None, *found[5:], None, None

    @staticmethod
    def vmap(*_: Any) -> NoReturn:
        raise NotImplementedError("ssd: no vmap; a batch is the first dimension of x")


def fake(x: Tensor, B: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, **_: Any) -> _Results:
    return x.new_empty(x.shape), states_like(x, B, state, cu_seqlens)
