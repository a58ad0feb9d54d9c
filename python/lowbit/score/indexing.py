# SPDX-License-Identifier: Apache-2.0
"""``x[...]`` inside a mod, in every form that torch supports: 0-d tensors, ints, lists, slices, None, ``...`` and
mixtures of them.

torch's own indexing would read the value of a 0-d index tensor. Here ints and slices become views first, and the other
indices are tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lowbit.score.program import UnknownOp


def getitem(apply: Callable[..., Any], tensor: Tensor, index: Any) -> Any:
    """Return ``tensor[index]``, composed of ATen ops that ``apply(name, *arguments)`` runs.

    Raises:
        UnknownOp: an index is a bool.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    items = [torch.tensor(item, device="cpu") if isinstance(item, (list, range)) else item for item in items]
    used = sum(item is not None and item is not Ellipsis for item in items)
    if Ellipsis in [item for item in items if not isinstance(item, Tensor)]:
        at = next(position for position, item in enumerate(items) if item is Ellipsis)
        items[at : at + 1] = [slice(None)] * (tensor.dim() - used)
    tensors: list[Tensor | None] = []
    view, dim = tensor, 0
    for item in items:
        if isinstance(item, bool):
            raise UnknownOp("an index of type bool")
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


class GetitemAsAten(TorchFunctionMode):
    """A mode that evaluates ``x[...]`` with tensor indices through `getitem`, so that torch.vmap can batch the indices.

    torch's own mode for this (TransformGetItemToIndex) loses gradients: in torch 2.13, those of ``x[..., h]`` or
    ``torch.gather`` are wrong, and ``x[h].sum()`` raises an error.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__getitem__ and any(
            isinstance(item, Tensor) for item in (args[1] if isinstance(args[1], tuple) else args[1:])
        ):
            return getitem(lambda name, *arguments: getattr(torch.ops.aten, name)(*arguments), *args)
        return func(*args, **(kwargs or {}))
