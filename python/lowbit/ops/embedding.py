# SPDX-License-Identifier: Apache-2.0
"""y[i, :] = w[indices[i], :] of a packed weight: what `QuantEmbedding` calls. Without data: shape and dtype of y."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit import _C
from lowbit.ops.fakes import FLOATS, check_spec, name_of, shape_text

_LAYOUT_NAMES = [*_C.LAYOUTS]
_FORMAT_NAMES = [*_C.FORMATS]


def fake(
    weight: Tensor,
    indices: Tensor,
    like: Tensor,
    n: int,
    k: int,
    format: int,
    group_size: int,
    asymmetric: bool,
    layout: int,
) -> Tensor:
    check_spec("embedding", n, k, format, group_size, asymmetric)
    if not 0 <= layout < len(_LAYOUT_NAMES):
        raise ValueError(f"embedding: layout must be 0..{len(_LAYOUT_NAMES) - 1}, got layout={layout}")
    if weight.dtype != torch.uint8:
        raise TypeError(f"embedding: weight must be packed uint8, got {name_of(weight.dtype)}")
    packed = _C.packed_shape(layout, n, k, format, group_size, asymmetric)
    if tuple(weight.shape) != packed:
        raise ValueError(
            f"embedding: weight must have the packed shape {shape_text(packed)} of {_FORMAT_NAMES[format]} in "
            f"{_LAYOUT_NAMES[layout]}, got {shape_text(weight.shape)}"
        )
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"embedding: indices must be int32 or int64, got {name_of(indices.dtype)}")
    if indices.dim() >= 8:
        raise ValueError(f"embedding: indices must have fewer than 8 dimensions, got {shape_text(indices.shape)}")
    if like.dtype not in FLOATS:
        raise TypeError(f"embedding: the result must be float32, bfloat16 or float16, got {name_of(like.dtype)}")
    return weight.new_empty((*indices.shape, k), dtype=like.dtype)
