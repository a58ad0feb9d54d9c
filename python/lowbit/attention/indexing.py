# SPDX-License-Identifier: Apache-2.0
"""``x[...]`` inside a mod, in every form that torch takes: 0-d tensors, ints, slices, None, ``...`` and mixtures of them.

torch itself would ask a 0-d index tensor for its number here. Ints and slices become views first; what is left are tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lowbit.attention.aten_ops import UnknownOp


def getitem(apply: Callable[..., Any], tensor: Tensor, index: Any) -> Any:
    """Return ``tensor[index]``, made of the ATen ops that ``apply(name, *arguments)`` runs."""
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(item is not None and item is not Ellipsis for item in items)
    if Ellipsis in [item for item in items if not isinstance(item, Tensor)]:
        at = next(position for position, item in enumerate(items) if item is Ellipsis)
        items[at : at + 1] = [slice(None)] * (tensor.dim() - used)
    tensors: list[Tensor | None] = []
    view, dim = tensor, 0
    for item in items:
        if isinstance(item, bool) or isinstance(item, (list, range)):
            raise UnknownOp(f"an index of type {type(item).__name__}")
        if item is None:
            view = apply("unsqueeze", view, dim)
        elif isinstance(item, Tensor):
            tensors += [None] * (dim - len(tensors)) + [item]
        elif isinstance(item, slice):
            if item != slice(None):
                step = 1 if item.step is None else item.step
                view = apply("slice", view, dim, item.start, item.stop, step)
        else:
            view = apply("select", view, dim, int(item))
            continue
        dim += 1
    return apply("index", view, tensors) if tensors else view
