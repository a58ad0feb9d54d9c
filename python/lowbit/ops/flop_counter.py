# SPDX-License-Identifier: Apache-2.0
"""Formulas for torch.utils.flop_counter: ``FlopCounterMode`` counts the ops like torch's own, with 2 operations for a
multiplication and its addition. Attention counts all keys, even if they are masked."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula, sdpa_flop_count

_ops = torch.ops.lowbit
_Shape = Sequence[int]


@register_flop_formula(_ops.linear)
def linear(x: _Shape, weight: _Shape, n: int, k: int, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Count the product of x ``[..., k]`` with a packed weight ``[n, k]``."""
    return 2 * prod(x[:-1]) * n * k


@register_flop_formula(_ops.gather_linear)
def gather_linear(
    x: _Shape, weight: _Shape, index: _Shape, n: int, k: int, *_: Any, out_shape: Any = None, **__: Any
) -> int:
    """Count one product with a packed weight ``[n, k]`` for each item of ``index`` ``[T, J]``."""
    return 2 * prod(index) * n * k


@register_flop_formula(_ops.experts)
def experts(
    x: _Shape, gate_up: _Shape, down: _Shape, index: _Shape, weights: _Shape, gate_up_args: _Shape, down_args: _Shape,
    *_: Any, out_shape: Any = None, **__: Any,
) -> int:  # fmt: skip
    """Count the products with both weights of an expert for each item of ``index`` ``[T, k]``, even if it means no
    expert."""
    return 2 * prod(index) * (prod(gate_up_args[:2]) + prod(down_args[:2]))


@register_flop_formula(_ops.linear_cross_entropy)
def linear_cross_entropy(
    x: _Shape, head: _Shape, labels: _Shape, n: int, k: int, format: int, group_size: int, asymmetric: bool,
    x_format: int, bias: _Shape | None = None, row_weight: _Shape | None = None, ignore_index: int = -100,
    scale: float = 1.0, softcap: float = 0.0, label_smoothing: float = 0.0, z_loss: float = 0.0, grad_x: bool = False,
    grad_head: bool = False, grad_bias: bool = False, *_: Any, out_shape: Any = None, **__: Any,
) -> int:  # fmt: skip
    """Count a product for the logits, one for the gradient of x, and for that of the head two, one of which computes
    the logits again. All rows count, even if they have no label."""
    return 2 * prod(x) * n * (1 + grad_x + (2 if grad_head else int(grad_bias)))


@register_flop_formula(_ops.block_sparse_linear)
def block_sparse_linear(x: _Shape, values: _Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Count the product of x ``[..., k]`` with the stored blocks ``[blocks, size, size]``."""
    return 2 * prod(x[:-1]) * prod(values)


@register_flop_formula(_ops.gated_delta_rule)
def gated_delta_rule(q: _Shape, k: _Shape, v: _Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Count three products with the state for each token: what its key reads, the change, and what its query reads."""
    return 6 * prod(v) * q[-1]


@register_flop_formula(_ops.gated_delta_rule_backward)
def gated_delta_rule_backward(q: _Shape, k: _Shape, v: _Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Count ten products of that size, four of which compute the states again."""
    return 20 * prod(v) * q[-1]


@register_flop_formula([_ops.ssd, _ops.ssd_])
def ssd(x: _Shape, dt: _Shape, A: _Shape, B: _Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Count two products with the state for each token: what it adds, and what it reads."""
    return 4 * prod(x) * B[-1]


@register_flop_formula(_ops.ssd_backward)
def ssd_backward(x: _Shape, dt: _Shape, A: _Shape, B: _Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Count six products of that size, two of which compute the states again."""
    return 12 * prod(x) * B[-1]


@register_flop_formula([_ops.selective_scan, _ops.selective_scan_])
def selective_scan(x: _Shape, dt: _Shape, A: _Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Count four products for each number of a state: with delta, what is added, what is kept, and what is read."""
    return 8 * prod(x) * A[-1]


@register_flop_formula(_ops.selective_scan_backward)
def selective_scan_backward(x: _Shape, dt: _Shape, A: _Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Count 15 products, seven of which compute the states again."""
    return 30 * prod(x) * A[-1]


@register_flop_formula(_ops.causal_conv1d)
def causal_conv1d(x: _Shape, weight: _Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Count K products for each element of x, like torch's depthwise convolution."""
    return 2 * prod(x) * weight[1]


@register_flop_formula(_ops.causal_conv1d_backward)
def causal_conv1d_backward(x: _Shape, weight: _Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Count the convolution again, and the products of the gradients of x and weight."""
    return 6 * prod(x) * weight[1]


@register_flop_formula(_ops.attention_forward)
def attention_forward(q: _Shape, k: _Shape, v: _Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Count attention like torch's scaled_dot_product_attention."""
    return sdpa_flop_count(q, k, v)


@register_flop_formula(_ops.attention_backward)
def attention_backward(q: _Shape, k: _Shape, v: _Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Count the backward of attention, which has five products instead of two."""
    return sdpa_flop_count(q, k, v) * 5 // 2
