# SPDX-License-Identifier: Apache-2.0
"""Derivatives of our ops in torch's dispatcher, for calls that do not come from a layer.

Such are the calls of an exported program, `torch.ops.lowbit.*` by hand, and what torch.compile and torch.func make of
both. Each op has two entries. The first, ``lowbit::linear``, has a kernel in Python for autograd, which computes the
derivative or says that there is none. It takes some 5 us. The second, ``lowbit::linear.detached``, is for callers that
have already checked: layers in eager mode, and graphs behind AOTAutograd. Autograd does nothing there, and the kernel
itself refuses a tensor whose gradient would be lost.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowbit.ops.forward_mode import refuse_tangents

_MODULES = {
    "linear": "linear",
    "gather_linear": "gather_linear",
    "experts": "experts",
    "block_sparse_linear": "block_sparse_linear",
    "attention_forward": "attention",
    "fake_quantize": "fake_quantize",
    "fake_quantize_activations": "fake_quantize",
    "route": "route",
}
"""Files in which ``differentiated_<op>`` is: the op, of its arguments by name, with its derivative."""
_OF_DTYPES = ("dequantize", "embedding")  # they read the dtype of a floating argument, and none of its numbers


def register(name: str, library: torch.library.Library) -> None:
    """Register what autograd does for ``lowbit::name``, and for its entry ``detached`` if it has one."""
    library.impl(name, _kernel(name), "Autograd", with_keyset=True)
    if hasattr(getattr(torch.ops.lowbit, name), "detached"):
        library.impl(f"{name}.detached", torch.library.fallthrough_kernel, "Autograd")


def is_differentiated() -> bool:
    """Whether a call may be asked for a derivative: gradients are recorded, or it is in forward mode."""
    return torch.is_grad_enabled() or forward_ad._current_level >= 0  # -1 outside of forward mode


def refuse_derivatives(op: str, tensors: Sequence[Tensor | None]) -> None:
    """Raise where a derivative is wanted of an op that has none.

    Raises:
        NotImplementedError: a tensor requires a gradient, or has a tangent.
    """
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise NotImplementedError(f"{op}: no argument may require a gradient, which this op does not have")
    if forward_ad._current_level >= 0:
        refuse_tangents(op, tensors)


def _kernel(name: str) -> Callable[..., Any]:
    """The kernel for autograd; arguments at the end that have their default are left out."""
    packet = getattr(torch.ops.lowbit, name)
    op, detached = packet.default, getattr(packet, "detached", None)
    arguments = op._schema.arguments
    names = [argument.name for argument in arguments]
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}

    def kernel(keys: torch._C.DispatchKeySet, *given: Any) -> Any:
        if name not in _OF_DTYPES and _is_wanted(given):
            _refuse_transforms(name)
            if name in _MODULES:
                return _differentiated(name)(**defaults | dict(zip(names, given, strict=False)))
            refuse_derivatives(name, _tensors(given))
        if detached is None or _keeps_derivatives():
            with torch._C._AutoDispatchBelowAutograd():
                return op.redispatch(keys & torch._C._after_autograd_keyset, *given)
        return detached(*given)

    return kernel


def _keeps_derivatives() -> bool:
    """Whether this call is recorded in a graph that autograd will see: one of torch.export, and not of AOTInductor."""
    if not torch.compiler.is_exporting():
        return False
    inductor = sys.modules.get("torch._inductor.virtualized")
    return inductor is None or inductor.V.aot_compilation is not True


def _tensors(given: Sequence[Any]) -> list[Tensor]:
    """The tensors among the arguments of a call, those of lists too."""
    tensors: list[Tensor] = []
    for value in given:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += [item for item in value if isinstance(item, Tensor)]
    return tensors


def _is_wanted(given: Sequence[Any]) -> bool:
    """Whether the call is asked for a derivative."""
    return forward_ad._current_level >= 0 or (
        torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors(given))
    )


def _refuse_transforms(name: str) -> None:
    """An autograd.Function has to begin above the levels of torch.func, which this call is below."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"{name}: torch.func takes derivatives of lowbit's layers and functions, such as lowbit.linear, and "
            f"none of torch.ops.lowbit.{name}"
        )


def _differentiated(name: str) -> Callable[..., Any]:
    """Looked up in a call: the files import this one, and a program that is loaded may need none of them."""
    return getattr(importlib.import_module(f"lowbit.ops.{_MODULES[name]}"), f"differentiated_{name}")
