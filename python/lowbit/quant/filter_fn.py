# SPDX-License-Identifier: Apache-2.0
"""Checks of ``filter_fn``, the function of the caller that selects layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from lowbit.quant.kinds import Kind, kind_of

FilterFn = Callable[[nn.Module, str], bool]
_WANTED = "quantize_: filter_fn must be a function of (module, qualified name), True selects"
_TURNED = f"{_WANTED}; got one that takes (name, module), the wrong way round"


def checked_filter(filter_fn: Any, model: nn.Module) -> FilterFn:
    """Return a filter that raises TypeError if ``filter_fn`` fails because it takes its arguments the wrong way round.

    Raises:
        TypeError: ``filter_fn`` is not a function of two arguments.
    """
    if not callable(filter_fn):
        raise TypeError(f"{_WANTED}; got {type(filter_fn).__name__}")
    _check_signature(filter_fn, model)

    def selects(module: nn.Module, name: str) -> bool:
        try:
            return filter_fn(module, name)
        except Exception as error:  # of the caller's code, which may raise anything
            if _turned(filter_fn, module, name) is not None:
                raise TypeError(_TURNED) from error
            raise

    return selects


def _check_signature(filter_fn: Any, model: nn.Module) -> None:
    try:
        signature = inspect.signature(filter_fn)
    except (TypeError, ValueError):  # callables written in C may have no signature
        return
    try:
        signature.bind(model, "")
    except TypeError as error:
        raise TypeError(f"{_WANTED}; got one of {signature}") from error


def refuse_turned(filter_fn: Any, model: nn.Module, kinds: Sequence[Kind]) -> None:
    """Raise TypeError if a filter that selected nothing selects layers when it is called with (name, module)."""
    for name, module in model.named_modules():
        if kind_of(module) in kinds and _turned(filter_fn, module, name):
            raise TypeError(_TURNED)


def _turned(filter_fn: Any, module: nn.Module, name: str) -> bool | None:
    """Return what the filter says if it is called with (name, module), or None if it raises."""
    try:
        return bool(filter_fn(name, module))
    except Exception:  # of the caller's code, which may raise anything
        return None
