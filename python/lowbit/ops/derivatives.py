# SPDX-License-Identifier: Apache-2.0
"""Derivatives of the ops in torch's dispatcher, for calls that do not come from a layer.

These are the calls of exported programs, direct calls of `torch.ops.lowbit.*`, and what torch.compile and torch.func
make of both. Each op has two overloads. The first, such as ``lowbit::linear``, has an autograd kernel in Python, which
computes the derivative or raises an error if there is none. That kernel is slow, so the second overload, such as
``lowbit::linear.detached``, is for callers that have already checked that no derivative is needed: layers in eager
mode, and graphs after AOTAutograd. Autograd skips it, and its kernel rejects a tensor whose gradient would be lost.
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
    "causal_conv1d": "causal_conv1d",
    "route": "route",
    "gated_delta_rule": "gated_delta_rule",
    "gated_rms_norm": "gated_rms_norm",
    "rms_norm": "rms_norm",
    "ssd": "ssd",
    "selective_scan": "selective_scan",
}
"""The file of each op that has a function ``differentiated_<op>``, which takes the op's arguments by name and computes
the op with its derivative."""
_OF_DTYPES = ("dequantize", "embedding")  # ops that read only the dtype of their floating argument, not its values


def register(name: str, library: torch.library.Library) -> None:
    """Register the autograd kernel of ``lowbit::name``, and a fallthrough for its overload ``detached`` if it
    exists."""
    library.impl(name, _kernel(name), "Autograd", with_keyset=True)
    if hasattr(getattr(torch.ops.lowbit, name), "detached"):
        library.impl(f"{name}.detached", torch.library.fallthrough_kernel, "Autograd")


def is_differentiated() -> bool:
    """Return whether a call may need a derivative: grad mode is enabled, or forward mode is active."""
    return torch.is_grad_enabled() or forward_ad._current_level >= 0  # the level is -1 outside forward mode


def is_recorded(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether autograd or torch.func has to see a call. While a program is exported, the dispatcher does."""
    if torch.compiler._is_exporting_flag:
        return False
    if not torch.compiler.is_dynamo_compiling() and torch._C._are_functorch_transforms_active():
        return True
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def refuse_derivatives(op: str, tensors: Sequence[Tensor | None]) -> None:
    """Raise if a derivative of an op is needed that does not exist.

    Raises:
        NotImplementedError: a tensor requires a gradient, or has a tangent.
    """
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise NotImplementedError(f"{op}: no argument may require a gradient, which this op does not have")
    if forward_ad._current_level >= 0:
        refuse_tangents(op, tensors)


def _kernel(name: str) -> Callable[..., Any]:
    """Return the autograd kernel of an op. torch omits trailing arguments that have their default."""
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
    """Return whether the call is recorded in a graph that autograd will process: by torch.export, unless for
    AOTInductor."""
    if not torch.compiler.is_exporting():
        return False
    inductor = sys.modules.get("torch._inductor.virtualized")
    return inductor is None or inductor.V.aot_compilation is not True


def _tensors(given: Sequence[Any]) -> list[Tensor]:
    """Return the tensors among the arguments of a call, including those in lists."""
    tensors: list[Tensor] = []
    for value in given:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += [item for item in value if isinstance(item, Tensor)]
    return tensors


def _is_wanted(given: Sequence[Any]) -> bool:
    """Return whether a derivative of the call is needed."""
    return forward_ad._current_level >= 0 or (
        torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors(given))
    )


def _refuse_transforms(name: str) -> None:
    """Raise if a torch.func transform is active: an autograd.Function must be entered above the levels of torch.func,
    but this call is already below them."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"{name}: torch.func takes derivatives of lowbit's layers and functions, such as lowbit.linear, and "
            f"none of torch.ops.lowbit.{name}"
        )


def _differentiated(name: str) -> Callable[..., Any]:
    """Return the function ``differentiated_<name>``. It is imported when needed, since these files import this one, and
    a loaded program may not need them."""
    return getattr(importlib.import_module(f"lowbit.ops.{_MODULES[name]}"), f"differentiated_{name}")
