# SPDX-License-Identifier: Apache-2.0
"""A causal convolution over time of each channel with itself, with a state:

y[t, d] = f(bias[d] + sum_j weight[d, j] u[t - (K - 1) + j, d]), where u are the inputs, and before them the state
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowbit.ops.causal_conv1d_backward import states_like
from lowbit.ops.derivatives import is_recorded, refuse_derivatives
from lowbit.ops.forward_mode import refuse_tangents
from lowbit.ops.registration import function_of, register

register()
_call, _backward = function_of("causal_conv1d"), function_of("causal_conv1d_backward")


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    *,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolve each channel over time with its own K taps, as the layers of Mamba-2, Qwen3-Next and LFM2 do.

    A result depends on its own input and the K - 1 before it: ``y[t] = f(bias + sum_j weight[:, j] x[t - (K - 1) + j])``.
    Inputs before the first are those of ``state``, or zeros. Computed in float32; y is rounded once. Results do not
    depend on the number of threads. x, weight, bias and state get gradients.

    Args:
        x: ``[B, T, D]`` float32, bfloat16 or float16. Strides are free if D is dense, as in ``h.transpose(1, 2)`` of
            transformers' ``[B, D, T]`` views of a projection; otherwise x is copied.
        weight: ``[D, K]``, K from 2 to 8, any of the three dtypes; the last tap is that of the current token. The
            ``weight.squeeze(1)`` of a depthwise ``nn.Conv1d``.
        bias: ``[D]``, any of the three dtypes, or None.
        state: ``[N, D, S]``, dtype of x, the last S inputs, the latest one last; S is K - 1 to 8, and K in the caches of
            transformers (``conv_states``). None is zeros, S = K - 1. N is B, or the number of packed sequences. It is
            not changed.
        activation: ``"silu"`` or None.
        cu_seqlens: int32 or int64 ``[N + 1]``, for B = 1: sequence n has the tokens ``cu_seqlens[n]`` to
            ``cu_seqlens[n + 1] - 1``.

    Returns:
        y ``[B, T, D]`` and the state after the last token ``[N, D, S]``, both in the dtype of x and contiguous.

    Raises:
        ValueError: a shape does not fit, cu_seqlens do not rise from 0 to T, or ``activation`` is not one of the above.
        TypeError: a dtype is not one of the above.
        NotImplementedError: no kernel row serves the device; or a second or forward-mode derivative or vmap is
            requested.

    Example:
        >>> y, state = lowbit.causal_conv1d(x, conv.weight.squeeze(1), conv.bias, activation="silu")
        >>> y, state = lowbit.causal_conv1d(next_token, conv.weight.squeeze(1), conv.bias, state, activation="silu")
    """
    if activation not in (None, "silu"):
        raise ValueError(f"causal_conv1d: activation must be None or 'silu', got {activation!r}")
    tensors, silu = (x, weight, bias, state), activation == "silu"
    if forward_ad._current_level >= 0:  # the level is -1 outside forward mode
        refuse_tangents("causal_conv1d", tensors)
    if is_recorded(tensors):
        return _CausalConv1d.apply(*tensors, silu, cu_seqlens)
    return _call(*tensors, silu, cu_seqlens)


def differentiated_causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, silu: bool, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `lowbit::causal_conv1d` with its gradient, for derivatives.py."""
    if forward_ad._current_level >= 0:
        refuse_tangents("causal_conv1d", (x, weight, bias, state))
    return _CausalConv1d.apply(x, weight, bias, state, silu, cu_seqlens)


class _CausalConv1d(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, silu: bool, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return _call(x, weight, bias, state, silu, cu_seqlens)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, bias, state, ctx.silu, cu_seqlens = inputs
        ctx.save_for_backward(x, weight, bias, state, cu_seqlens)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None, grad_state: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, bias, state, cu_seqlens = ctx.saved_tensors
        if grad_y is None:
            grad_y = torch.zeros_like(x)
        if torch.is_grad_enabled():  # create_graph=True
            refuse_derivatives("the backward of causal_conv1d", (x, weight, bias, state, grad_y, grad_state))
        grads = _backward(x, weight, grad_y, bias, state, grad_state, ctx.silu, cu_seqlens)
        wanted = ctx.needs_input_grad[:4]
        return *(grad if needed else None for grad, needed in zip(grads, wanted, strict=True)), None, None

    @staticmethod
    def vmap(*_: Any) -> NoReturn:
        raise NotImplementedError("causal_conv1d: vmap is not supported; the first dimension of x is the batch")


def fake(x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, **_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), states_like(x, weight, state, cu_seqlens)
