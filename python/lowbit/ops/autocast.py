# SPDX-License-Identifier: Apache-2.0
"""Ops in ``torch.autocast``: activations are cast to autocast's dtype, which the result has too, as in nn.Linear.
`lowbit::linear` has kernels for it in the dispatcher; functions of other ops call `in_autocast_dtype`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


def in_autocast_dtype(x: Tensor) -> Tensor:
    """Cast x to the dtype of autocast if that is enabled. This must happen before rounding, since the codes would
    differ otherwise. torch has no autocast for the meta device, and raises if it is asked."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def register_linear(library: torch.library.Library) -> None:
    """Register the op's autocast kernels, which cost nothing while autocast is off."""
    for device, key in _KEYS.items():
        keys = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(key))
        library.impl("linear", _cast_before(torch.ops.lowbit.linear.default, device, keys), key)
        library.impl("linear.detached", _cast_before(torch.ops.lowbit.linear.detached, device, keys), key)


def _cast_before(op: torch._ops.OpOverload, device: str, keys: torch._C.DispatchKeySet) -> Callable[..., Tensor]:
    casts = [argument.name in ("x", "mul", "add") for argument in op._schema.arguments]

    def linear(*arguments):  # torch omits trailing arguments that have their default
        dtype = torch.get_autocast_dtype(device)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(*[_cast(value, dtype) if cast else value for value, cast in zip(arguments, casts, strict=False)])

    return linear


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Cast a floating tensor other than float64, as autocast does."""
    wanted = tensor is not None and tensor.is_floating_point() and tensor.dtype is not torch.float64
    return tensor.to(dtype) if wanted else tensor
