# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule, linear attention with a state S per head that decays and that each token corrects:

S = exp(g_t) S;    S = S + k_t (beta_t (v_t - S^T k_t))^T;    o_t = scale S^T q_t
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowbit.ops.derivatives import refuse_derivatives
from lowbit.ops.flash_linear_attention import gated_delta_rule_by_fla
from lowbit.ops.forward_mode import refuse_tangents
from lowbit.ops.gated_delta_rule_backward import states_like
from lowbit.ops.registration import function_of, register

register()
_call, _backward = function_of("gated_delta_rule"), function_of("gated_delta_rule_backward")


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    l2norm: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule of Qwen3-Next and Qwen3.5, or with a decay per channel that of Kimi-Linear (KDA).

    Each head has a state S ``[Dk, Dv]``. A token lets it decay, ``S = exp(g) S``, replaces what its key reads,
    ``S = S + k (beta (v - S^T k))^T``, and reads the result, ``o = scale S^T q``. Computed in float32; o and the new
    state are rounded once. Results do not depend on the number of threads. q, k, v, g, beta and state get gradients; the
    backward computes the states again, and needs memory for one of every 60 tokens.

    Args:
        q, k: ``[B, T, Hk, Dk]`` float32, bfloat16 or float16, any strides.
        v: ``[B, T, Hv, Dv]``, dtype of q; Hv is a multiple of Hk. Each head of q and k serves Hv / Hk consecutive heads
            of v.
        g: logarithms of the decays, finite and at most 0: ``[B, T, Hv]``, or ``[B, T, Hv, Dk]`` with one per channel of
            k. Any of the three dtypes.
        beta: ``[B, T, Hv]``, any of the three dtypes. A token with g = 0 and beta = 0, such as left padding, leaves the
            state as it is.
        state: float32 or bfloat16 ``[N, Hv, Dk, Dv]``, the state before the first token; None is zeros. N is B, or the
            number of packed sequences. It is not changed.
        l2norm: whether q and k are divided by ``sqrt(sum of squares + 1e-6)`` first.
        scale: factor of q; None is ``Dk ** -0.5``.
        cu_seqlens: int32 or int64 ``[N + 1]``, for B = 1: sequence n has the tokens ``cu_seqlens[n]`` to
            ``cu_seqlens[n + 1] - 1``.

    Returns:
        o ``[B, T, Hv, Dv]`` in the dtype of v, and the state after the last token ``[N, Hv, Dk, Dv]``, in the dtype of
        ``state`` or float32; both contiguous.

    Raises:
        ValueError: a shape does not fit, g is positive or not finite, cu_seqlens do not rise from 0 to T, or scale is
            not finite.
        TypeError: a dtype is not one of the above.
        NotImplementedError: no kernel row serves the device, or a forward-mode or second derivative is requested. CUDA
            tensors are served through the package flash-linear-attention, with its roundings, if it is installed.

    Example:
        >>> o, state = lowbit.gated_delta_rule(q, k, v, g, beta, l2norm=True)
        >>> o, state = lowbit.gated_delta_rule(*next_token, state, l2norm=True)
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if forward_ad._current_level >= 0:  # the level is -1 outside forward mode
        refuse_tangents("gated_delta_rule", (q, k, v, g, beta, state))
    if q.is_cuda:
        return gated_delta_rule_by_fla(q, k, v, g, beta, state, l2norm, scale, cu_seqlens)
    wanted = any(tensor is not None and tensor.requires_grad for tensor in (q, k, v, g, beta, state))
    if torch.is_grad_enabled() and wanted and not torch.compiler._is_exporting_flag:  # then the dispatcher gives it
        return _GatedDeltaRule.apply(q, k, v, g, beta, state, l2norm, scale, cu_seqlens)
    return _call(q, k, v, g, beta, state, l2norm, scale, cu_seqlens)


def differentiated_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    l2norm: bool,
    scale: float,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute `lowbit::gated_delta_rule` with its gradient, for derivatives.py."""
    if forward_ad._current_level >= 0:
        refuse_tangents("gated_delta_rule", (q, k, v, g, beta, state))
    return _GatedDeltaRule.apply(q, k, v, g, beta, state, l2norm, scale, cu_seqlens)


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor | None,
        l2norm: bool,
        scale: float,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v, g, beta, state, cu_seqlens)
        ctx.l2norm, ctx.scale = l2norm, scale
        ctx.set_materialize_grads(False)
        return _call(q, k, v, g, beta, state, l2norm, scale, cu_seqlens)

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor | None, grad_final_state: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, state, cu_seqlens = ctx.saved_tensors
        if grad_o is None:
            grad_o = torch.zeros_like(v)
        if torch.is_grad_enabled():  # create_graph=True
            refuse_derivatives("the backward of gated_delta_rule", (q, k, v, g, beta, state, grad_o, grad_final_state))
        grads = _backward(q, k, v, g, beta, grad_o, state, grad_final_state, ctx.l2norm, ctx.scale, cu_seqlens)
        grads = [grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=False)]
        return *grads, None, None, None


def fake(q: Tensor, v: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, **_: Any) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), states_like(q, v, state, cu_seqlens)
