# SPDX-License-Identifier: Apache-2.0
"""The feed-forward layer of a mixture of experts with packed weights, and its gradients:

y[t] = sum over j of weights[t, j] * (act(gate_e(x[t]), up_e(x[t])) @ down_e.T + down_bias_e),    e = index[t, j]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

from lowbit.ops.autocast import in_autocast_dtype
from lowbit.ops.derivatives import is_recorded, refuse_derivatives
from lowbit.ops.forward_mode import refuse_tangents
from lowbit.ops.gather_linear import check_index, grad_of_rows
from lowbit.ops.linear import LinearArgs
from lowbit.ops.registration import function_of, register

register()
_call = function_of("experts")
_gather_linear = function_of("gather_linear")

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", "relu_squared")
"""Names of the activations; the op takes their index."""


class Gate(NamedTuple):
    """What is computed between the two products; see `lowbit.experts`. The activation is an index of ``ACTIVATIONS``,
    and a limit of 0 means no limit."""

    activation: int
    gated: bool
    interleaved: bool
    alpha: float
    limit: float
    up_offset: float


def gate_of(
    activation: str = "silu",
    *,
    gated: bool = True,
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> Gate:
    """Return the `Gate` for these arguments of `lowbit.experts`.

    Raises:
        ValueError: the activation is unknown, or limit is not positive.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"experts: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if limit is not None and not limit > 0:
        raise ValueError(f"experts: limit must be positive, or None for none, got {limit}")
    return Gate(ACTIVATIONS.index(activation), gated, interleaved, alpha, limit or 0.0, up_offset)


def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    index: Tensor,
    weights: Tensor,
    gate_up_args: LinearArgs,
    down_args: LinearArgs,
    gate: Gate,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Compute `lowbit.experts` with numbers instead of names, as layers store them."""
    check_index("experts", index)
    x = in_autocast_dtype(x)
    given = (x, weights, gate_up_bias, down_bias)
    if forward_ad._current_level >= 0:  # the level is -1 outside forward mode
        refuse_tangents("experts", given)
    of = [int(number) for number in gate_up_args], [int(number) for number in down_args]
    if is_recorded(given):
        return _Experts.apply(x, gate_up, down, index, weights, *of, gate, gate_up_bias, down_bias)
    return _call(x, gate_up, down, index, weights, *of, *gate, gate_up_bias, down_bias)


def differentiated_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    index: Tensor,
    weights: Tensor,
    gate_up_args: Sequence[int],
    down_args: Sequence[int],
    activation: int,
    gated: bool,
    interleaved: bool,
    alpha: float,
    limit: float,
    up_offset: float,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> Tensor:
    """Compute `lowbit::experts` with its gradient, for derivatives.py."""
    if forward_ad._current_level >= 0:
        refuse_tangents("experts", (x, weights, gate_up_bias, down_bias))
    gate = Gate(activation, gated, interleaved, alpha, limit, up_offset)
    return _Experts.apply(
        x, gate_up, down, index, weights, list(gate_up_args), list(down_args), gate, gate_up_bias, down_bias
    )


class _Experts(torch.autograd.Function):
    """Autograd Function of the op. The backward recomputes both products for each pair of token and expert, with
    intermediate results [T, k, H] in float32."""

    @staticmethod
    def forward(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor, gate_up_args: list[int],
                down_args: list[int], gate: Gate, gate_up_bias: Tensor | None,
                down_bias: Tensor | None) -> Tensor:  # fmt: skip
        return _call(x, gate_up, down, index, weights, gate_up_args, down_args, *gate, gate_up_bias, down_bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.gate_up_args, ctx.down_args, ctx.gate, gate_up_bias, down_bias = inputs
        ctx.save_for_backward(*tensors, gate_up_bias, down_bias)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *given: Any) -> tuple[Tensor, int]:
        """Make one call for each index of the mapped dimension."""
        dims = [dim if isinstance(value, Tensor) else None for value, dim in zip(given, in_dims, strict=True)]

        def call(i: int) -> Tensor:
            return _Experts.apply(
                *(value if dim is None else value.select(dim, i) for value, dim in zip(given, dims, strict=True))
            )

        return torch.stack([call(i) for i in range(info.batch_size)]), 0

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, gate_up, down, index, weights, gate_up_bias, down_bias = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            refuse_derivatives("the backward of experts", (x, weights, gate_up_bias, down_bias, grad_out))
        nobody = index == len(gate_up)
        index = index.masked_fill(nobody, 0)
        sums = _gather_linear(x, gate_up, index, *ctx.gate_up_args, gate_up_bias)
        hidden, slopes = _gated(sums.float(), ctx.gate)
        grad_out = grad_out.float()
        grad_weights = None
        if ctx.needs_input_grad[4]:
            each = _gather_linear(hidden.to(x.dtype), down, index, *ctx.down_args, down_bias)
            grad_weights = torch.einsum("tjn,tn->tj", each.float(), grad_out).masked_fill(nobody, 0).to(weights.dtype)
        grad_each = grad_out[:, None] * weights.float().masked_fill(nobody, 0)[..., None]
        grad_down_bias = _of_bias(grad_each, index, down_bias) if ctx.needs_input_grad[9] else None
        if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[8]):
            return None, None, None, None, grad_weights, None, None, None, None, grad_down_bias
        grad_hidden = grad_of_rows(grad_each, down, index, ctx.down_args)
        grad_sums = _joined([slope * grad_hidden for slope in slopes], ctx.gate)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad_of_rows(grad_sums, gate_up, index, ctx.gate_up_args).sum(1).to(x.dtype)
        grad_gate_up_bias = _of_bias(grad_sums, index, gate_up_bias) if ctx.needs_input_grad[8] else None
        return grad_x, None, None, None, grad_weights, None, None, None, grad_gate_up_bias, grad_down_bias


def gated_value(sums: Tensor, gate: Gate) -> Tensor:
    """Return act(gate, up) for the first product's results ``[..., 2 I]``, or ``[..., I]`` if there is no up."""
    return _gated(sums, gate)[0]


def _gated(sums: Tensor, gate: Gate) -> tuple[Tensor, list[Tensor]]:
    """Return act(gate, up) for the first product's results, and its derivatives with respect to gate and, if it exists,
    up."""
    if not gate.gated:
        value, slope = _activated(sums, gate)
        return value, [slope]
    given, up = (sums[..., ::2], sums[..., 1::2]) if gate.interleaved else sums.chunk(2, -1)
    limited, factor = given, up
    if gate.limit:
        limited, factor = given.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
    value, slope = _activated(limited, gate)
    shifted = factor + gate.up_offset
    return value * shifted, [slope * shifted * (given == limited), value * (up == factor)]


def _activated(x: Tensor, gate: Gate) -> tuple[Tensor, Tensor]:
    """Return the activation and its derivative."""
    name, one = ACTIVATIONS[gate.activation], torch.ones_like(x)
    if name == "silu":
        sigmoid = torch.sigmoid(gate.alpha * x)
        return x * sigmoid, sigmoid * (1 + gate.alpha * x * (1 - sigmoid))
    if name.startswith("gelu"):
        form = "tanh" if name == "gelu_tanh" else "none"
        return functional.gelu(x, approximate=form), torch.ops.aten.gelu_backward(one, x, approximate=form)
    if name == "relu":
        return x.relu(), (x > 0).to(x.dtype)
    return (x.relu().square(), 2 * x.relu()) if name == "relu_squared" else (x, one)


def _joined(grads: list[Tensor], gate: Gate) -> Tensor:
    """Return the gradients of gate and up in the column order of the first product."""
    return torch.stack(grads, -1).flatten(-2) if gate.interleaved else torch.cat(grads, -1)


def _of_bias(grad: Tensor, index: Tensor, bias: Tensor) -> Tensor:
    return torch.zeros_like(bias, dtype=torch.float32).index_add_(0, index.flatten(), grad.flatten(0, 1)).to(bias.dtype)


def fake(x: Tensor, down_args: Sequence[int], **_: Any) -> Tensor:
    return x.new_empty((x.shape[0], down_args[0]))
