# SPDX-License-Identifier: Apache-2.0
"""`lowbit::linear` in ``torch.autocast("cpu")``: activations enter in autocast's dtype, the result has it, as
nn.Linear's."""

from __future__ import annotations

import torch
from torch import Tensor

_KEY = "AutocastCPU"


def register_linear(library: torch.library.Library) -> None:
    """Register the op's kernel for autocast; without autocast it is not on the way."""
    keys = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(_KEY))
    op = torch.ops.lowbit.linear.default
    casts = [argument.name in ("x", "mul", "add") for argument in op._schema.arguments]

    def linear(*arguments):  # those at the end that have their default are left out
        dtype = torch.get_autocast_dtype("cpu")
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(*[_cast(value, dtype) if cast else value for value, cast in zip(arguments, casts, strict=False)])

    library.impl("linear", linear, _KEY)


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Cast what autocast casts: floats but float64."""
    wanted = tensor is not None and tensor.is_floating_point() and tensor.dtype is not torch.float64
    return tensor.to(dtype) if wanted else tensor
