# SPDX-License-Identifier: Apache-2.0
"""torch.utils.flop_counter: ``FlopCounterMode`` counts our ops as it counts torch's, 2 for a product and its addition,
with all keys of attention, whatever a mask hides."""

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
    """x ``[..., k]`` times a packed weight ``[n, k]``."""
    return 2 * prod(x[:-1]) * n * k


@register_flop_formula(_ops.gather_linear)
def gather_linear(
    x: _Shape, weight: _Shape, index: _Shape, n: int, k: int, *_: Any, out_shape: Any = None, **__: Any
) -> int:
    """Each row of ``index`` ``[T, J]`` times one packed weight ``[n, k]``."""
    return 2 * prod(index) * n * k


@register_flop_formula(_ops.experts)
def experts(
    x: _Shape, gate_up: _Shape, down: _Shape, index: _Shape, weights: _Shape, gate_up_args: _Shape, down_args: _Shape,
    *_: Any, out_shape: Any = None, **__: Any,
) -> int:  # fmt: skip
    """Each pair of ``index`` ``[T, k]``, those of no expert too, times both weights of one expert."""
    return 2 * prod(index) * (prod(gate_up_args[:2]) + prod(down_args[:2]))


@register_flop_formula(_ops.block_sparse_linear)
def block_sparse_linear(x: _Shape, values: _Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """x ``[..., k]`` times the blocks that are there, ``[blocks, size, size]``."""
    return 2 * prod(x[:-1]) * prod(values)


@register_flop_formula(_ops.attention_forward)
def attention_forward(q: _Shape, k: _Shape, v: _Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """As torch's scaled_dot_product_attention."""
    return sdpa_flop_count(q, k, v)


@register_flop_formula(_ops.attention_backward)
def attention_backward(q: _Shape, k: _Shape, v: _Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """As its backward, which has five products for two."""
    return sdpa_flop_count(q, k, v) * 5 // 2
