# SPDX-License-Identifier: Apache-2.0
"""Autocast: matrix products and attention in the low dtype, long sums in float32, other ops unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowbit.devices.private_use import claimed

_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
_LOW = (
    "linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "scaled_dot_product_attention",
)  # fmt: skip
_FLOAT32 = (
    "softmax.int", "log_softmax.int", "layer_norm", "group_norm", "exp", "log", "pow.Tensor_Scalar", "sum",
    "sum.dim_IntList", "prod", "cumsum", "nll_loss", "cross_entropy_loss", "mse_loss", "l1_loss", "smooth_l1_loss",
    "binary_cross_entropy_with_logits",
)  # fmt: skip


def register(library: torch.library.Library) -> None:
    """Register the kernels of AutocastPrivateUse1 in ``library`` (for `aten`)."""
    for names, low in ((_LOW, True), (_FLOAT32, False)):
        for name in names:
            base, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, base), overload or "default")
            library.impl(name, _kernel(op, low), "AutocastPrivateUse1")


def _kernel(op: Any, low: bool) -> Callable[..., Any]:
    def kernel(*args: Any, **options: Any) -> Any:
        dtype = torch.get_autocast_dtype(claimed.name) if low else torch.float32
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            return op(*_cast(args, dtype), **{key: _cast(value, dtype) for key, value in options.items()})

    return kernel


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        castable = value.device.type == claimed.name and value.is_floating_point() and value.dtype != torch.float64
        return value.to(dtype) if castable else value
    return type(value)(_cast(item, dtype) for item in value) if isinstance(value, list | tuple) else value
